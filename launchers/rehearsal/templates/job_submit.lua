-- Accepts and refuses jobs by the rules of the site above, as its accounting database would, in Slurm's own words.
-- What a user sees: the line given to log_user, then Slurm's text of the code that is returned.
local INVALID_PARTITION, INVALID_FEATURE, INVALID_ACCOUNT, POLICY, INVALID_TIME, INVALID_QOS =
  2000, 2029, 2045, 2050, 2051, 2066

local function missing(value)
  return value == nil or value == "" or value == slurm.NO_VAL
end

local function refuse(code, text)
  if text then slurm.log_user(text) end
  return code
end

local function nodes_of(job)
  if not missing(job.min_nodes) and job.min_nodes > 0 then return job.min_nodes end
  local tasks, per_node = job.num_tasks, job.ntasks_per_node
  if missing(tasks) or missing(per_node) or per_node == slurm.NO_VAL16 or per_node == 0 then return 1 end
  return math.ceil(tasks / per_node)
end

-- Slurm shows the plugin its jobs as they were at the last full second.
local function waiting_or_running(uid, qos)
  local count = 0
  for _, other in pairs(slurm.jobs) do
    if other.user_id == uid and other.job_state <= 2 and (qos == nil or other.admin_comment == "qos=" .. qos) then
      count = count + 1
    end
  end
  return count
end

local shares = false -- whether others may have the rest of the job's nodes

local function check_options(job)
  local known = not missing(job.account) and site.accounts[string.lower(job.account)]
  if not known and (site.required.account or not missing(job.account)) then
    return refuse(INVALID_ACCOUNT, "account: " .. site.account_hint .. " (here --account=" .. site.account_example .. ")")
  end
  if site.required.time and missing(job.time_limit) then return refuse(INVALID_TIME) end
  if site.required.constraint and missing(job.features) then
    return refuse(INVALID_FEATURE, "a job must name the kind of its nodes (--constraint)")
  end
  return slurm.SUCCESS
end

local function check_partition(job, nodes)
  local name = missing(job.partition) and site.default_partition or job.partition
  local partition = site.partitions[name]
  if partition == nil then return slurm.SUCCESS end -- Slurm itself knows which partitions there are
  shares = partition.share > 0
  for _, limit in ipairs(partition.limits) do
    if nodes <= limit.max_nodes then
      local too_long = not missing(job.time_limit) and job.time_limit > limit.max_hours * 60
      return too_long and refuse(INVALID_TIME) or slurm.SUCCESS
    end
  end
  return refuse(2006)
end

local function check_qos(job, nodes, uid)
  local name = missing(job.qos) and site.default_qos or job.qos
  if name == "" then return slurm.SUCCESS end
  local prefix = site.qos_prefix
  if prefix ~= "" and string.sub(name, 1, #prefix) == prefix then
    return refuse(slurm.ERROR, "Job request does not match any supported policy.")
  end
  local qos = site.qos[name]
  if qos == nil then return refuse(INVALID_QOS) end
  if qos.max_nodes > 0 and nodes > qos.max_nodes then return refuse(POLICY, "QOSMaxNodePerJobLimit") end
  if qos.max_hours > 0 and not missing(job.time_limit) and job.time_limit > qos.max_hours * 60 then
    return refuse(POLICY, "QOSMaxWallDurationPerJobLimit")
  end
  if qos.max_jobs > 0 and waiting_or_running(uid, name) >= qos.max_jobs then
    return refuse(POLICY, "QOSMaxSubmitJobPerUserLimit")
  end
  local seen = name -- what the job is told, as where there is a database
  if prefix ~= "" and string.find(job.features or "", "gpu", 1, true) then seen = prefix .. name end
  local inside = job.environment and job.environment["SLURM_JOB_QOS"] == seen -- submitted by a job of this QOS
  job.admin_comment = "qos=" .. name
  if job.environment then job.environment["SLURM_JOB_QOS"] = seen end
  if qos.preemptible then job.partition = "preemptible" end
  if not qos.may_chain then
    job.requeue = 0
    local after = not missing(job.dependency) and job.dependency ~= "singleton"
    if after or inside then return refuse(POLICY, "QOS " .. name .. ": chains of jobs are prohibited in it") end
  end
  shares = shares or qos.share > 0
  return slurm.SUCCESS
end

function slurm_job_submit(job, partitions, uid)
  if job.partition == "preemptible" then return refuse(INVALID_PARTITION) end
  local nodes = nodes_of(job)
  shares = false
  for _, check in ipairs({ check_options, check_partition, check_qos }) do
    local code = check(job, nodes, uid)
    if code ~= slurm.SUCCESS then return code end
  end
  if site.max_jobs > 0 and waiting_or_running(uid) >= site.max_jobs then
    return refuse(POLICY, "AssocMaxSubmitJobLimit")
  end
  if not shares then job.shared = 0 end -- a job has its nodes for itself
  return slurm.SUCCESS
end

function slurm_job_modify(job, record, partitions, uid)
  return slurm.SUCCESS
end

return slurm.SUCCESS
