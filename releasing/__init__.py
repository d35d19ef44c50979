"""A release in one command, `make release VERSION=1.2.3`; nothing is changed here before all of it went well."""
