"""What can be requested: the services behind the request handlers, and the recovery of orphans."""
