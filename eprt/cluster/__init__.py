"""What a cluster would do: exchange times, step times, memory and cost of a model on N nodes, predicted on paper.

`eprt plan-cluster` prints them. A prediction is arithmetic over published and measured times; docs/cluster-planner.md
says which. Knows nothing of running ranks.
"""
