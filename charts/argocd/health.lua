-- Health of an InferenceFleet or a WorkerPool for Argo CD (Lua 5.1): put this text into argocd-cm under both
-- resource.customizations.health.inferencefleet.io_InferenceFleet and resource.customizations.health.inferencefleet.io_WorkerPool.
local function health(status, message)
  return { status = status, message = message or "" }
end

-- what somebody edited may lack either
local function words(condition)
  return (condition.reason or "no reason") .. ": " .. (condition.message or "")
end

local ROLLOUT_FAILED = { Stuck = true, ProgressDeadlineExceeded = true, RolledBack = true }
local WORKERS_BAD = { WorkersFailing = true, WorkersLate = true }

local function fleet_health()
  local found = {}
  for _, condition in ipairs(obj.status.conditions or {}) do
    found[condition.type or ""] = condition
  end
  if (obj.status.observedGeneration or 0) < (obj.metadata.generation or 0) then
    return health("Progressing", "waiting for the operator to look at this generation")
  end
  -- before Ready: it may be older than the spec that was refused
  local accepted = found.Accepted
  if accepted ~= nil and accepted.status == "False" then
    return health("Degraded", words(accepted))
  end
  local ready, rolling = found.Ready, found.RollingOut
  if ready == nil then
    return health("Progressing", "waiting for the operator to look at this generation")
  end
  -- a rollout that ended badly is no success, though the revision before it serves
  if rolling ~= nil and ROLLOUT_FAILED[rolling.reason or ""] then
    return health("Degraded", words(rolling))
  end
  if rolling ~= nil and rolling.reason == "Paused" then
    return health("Suspended", rolling.message)
  end
  if ready.status == "True" then
    if rolling ~= nil and rolling.status == "True" then
      return health("Progressing", rolling.message)
    end
    return health("Healthy", ready.message)
  end
  local limited, available = found.CapacityLimited, found.Available
  if limited ~= nil and limited.status == "True" then
    return health(limited.reason == "Queued" and "Progressing" or "Degraded", limited.message)
  end
  -- what does not mend itself: the spec, a refused write, workers that end and end again, or are late (rollout.progressDeadline)
  if ready.reason == "NotAccepted" or ready.reason == "NotProvisioned" then
    return health("Degraded", ready.message)
  end
  if available ~= nil and WORKERS_BAD[available.reason or ""] then
    return health("Degraded", available.message)
  end
  return health("Progressing", ready.message)
end

local function pool_health()
  local wanted, there, ready = (obj.spec or {}).replicas or 0, obj.status.replicas or 0, obj.status.readyReplicas or 0
  local message = ready .. " of " .. wanted .. " workers are ready"
  if there == wanted and ready == wanted then
    return health("Healthy", message)
  end
  return health("Progressing", message)
end

if obj.metadata.deletionTimestamp ~= nil then
  return health("Progressing", "draining and leaving")
end
if obj.status == nil then
  return health("Progressing", "waiting for the operator")
end
if obj.kind == "WorkerPool" then
  return pool_health()
end
return fleet_health()
