"""Moving experts between ranks while they serve: rounds, pace, and the transports that copy weights."""
