"""The OpenAI-compatible server: one frontend process that speaks HTTP, and the ranks behind it.

__main__    which role this process has       options    every flag
frontend    the process that speaks HTTP      running    a server for as long as a block lasts
http/       connections, bodies, routes       openai/    requests, chat templates, answers
ranks/      launching, messages, rank loops   rebalance/, diagnosis/    what runs beside serving
"""
