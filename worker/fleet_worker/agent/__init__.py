"""PID 1 of a worker pod: prepares the model, starts and supervises one engine, answers probes, drains, reports the truth."""
