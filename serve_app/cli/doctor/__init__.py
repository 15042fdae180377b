"""What of this machine and installation an instance needs, looked at without starting anything."""
