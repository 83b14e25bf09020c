"""OpenAI's API: request schemas, parsing, chat templates, tool calls, and answers."""
