"""The OpenAI-compatible server.

Start     __main__ (which role this process has), options (flags), launch (mpirun), running (a server for a block)
Rank      rank_main (one rank's process), worker (its loop), channel (its sockets)
Frontend  frontend (its process and life), rank_pool (the ranks as it sees them), api (HTTP)
Request   protocol (checks), prepare (template, tokens, limits), chat, tools
Answer    answer (documents and events), choice (one sequence's text, log-probabilities and calls), errors
Outside   metrics, expert_load, diagnosis (collection, notices, diagnosis_metrics, diagnosis_page), rebalance
Between   messages (what ranks and frontend say to each other)
"""
