"""HTTP/1.1 and JSON on a unix socket (docs/http-api.md): the door of the command line."""
