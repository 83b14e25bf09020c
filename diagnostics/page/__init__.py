"""The web page: its server, the sources of its data, and the static files in web/."""
