"""Several hosts: how their launchers meet, agree, and end together. The ranks' own messages go over ep/wire."""
