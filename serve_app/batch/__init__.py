"""A file of requests answered in this process: the server's own engine and answers, without Ray or HTTP."""
