"""The process runtime: a kubelet stand-in that runs each pod's containers as local processes (`fleet up`, e2e)."""
