"""The router's policy as an Endpoint Picker of the Gateway API inference extension: Envoy's ext_proc over gRPC."""
