"""Where experts live: from logical experts to slots, which replica a token takes, and the load that is counted."""
