"""`hegmctl top`: the live view. The only part of the client that needs textual; nothing else imports it."""
