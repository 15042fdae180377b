"""Answers a file of requests in this process, with the server's engine and answers, without Ray or HTTP."""
