"""The OpenAI-compatible server: one frontend process that speaks HTTP, and the ranks behind it.

__main__    which role this process has       flags, engine_flags    the command line
frontend    the process that speaks HTTP      options    what the server was asked for
http/       connections, bodies, routes       running    a server for as long as a block lasts
openai/     requests, chat templates, answers
ranks/      launching, messages, rank loops   rebalance/, diagnosis/    what runs beside serving
"""
