"""What breaks around a worker, and what must hold all the same. The full counts run with --full."""
