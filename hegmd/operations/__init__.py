"""The services behind requests: the services behind the request handlers, and the recovery of orphans."""
