"""Certificates of the webhook: made here, kept in one Secret, renewed with an overlap of authorities."""
