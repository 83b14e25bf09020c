"""The subcommands of `eprt balance`, one file each.

add_parser(commands) declares the options, run(arguments) does the work and returns the exit status. ValueError and
OSError become one line on standard error and status 2.
"""
