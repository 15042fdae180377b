"""What clients see while parts of a cluster die under them. Knows Serve's processes by kind; measures from outside."""
