"""Why a request went where it went: decision records, spans, log lines, the Gateway API's metrics. Never a prompt."""
