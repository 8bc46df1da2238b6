-- Lends what limits have left. Each key is one counter, a hash:
--
--   spent   what was used and has not come back
--   at      when that was so, by the server's clock, in seconds
--   h:NAME  what a borrower holds, and until when: "held until"
--
-- ARGV: the borrower's name, the seconds that a loan lasts, and for each key six: kind, amount,
-- period, wanted, held, used. The reply has two for each key: what is granted, and in how many
-- seconds there may be more.
--
-- amount - spent - all that is held is free. What was held up to a moment that is over is free
-- again: its borrower is dead, or knows that it is over. Grants are whole, so that no two wait for
-- each other's half.

local clock = redis.call('TIME')
local now = clock[1] + clock[2] / 1000000
local borrower, lasts = 'h:' .. ARGV[1], tonumber(ARGV[2])

local function come_back(kind, amount, period, spent, at)
  if kind == 'rate' then
    return math.max(0, spent - math.max(0, now - at) * amount / period)
  elseif math.floor(now / period) > math.floor(at / period) then
    return 0
  end
  return spent
end

local function held_by_others(key, fields)
  local held = 0
  for name, value in pairs(fields) do
    if string.sub(name, 1, 2) == 'h:' and name ~= borrower then
      local holds, till = string.match(value, '^(%S+) (%S+)$')
      if tonumber(till) > now then
        held = held + holds
      else
        redis.call('HDEL', key, name)
      end
    end
  end
  return held
end

local function hold(key, held, period)
  if held > 0 then
    redis.call('HSET', key, borrower, string.format('%d %.6f', held, now + lasts))
  else
    redis.call('HDEL', key, borrower)
  end
  redis.call('PEXPIRE', key, math.ceil((period + lasts) * 1000))
end

local function seats(key, fields, amount, wanted, held)
  local granted = math.min(wanted, math.max(held, amount - held_by_others(key, fields)))
  hold(key, granted, 0)
  return granted, 1
end

local function amounts(key, fields, kind, amount, period, wanted, held, used)
  local spent, at = fields['spent'] or 0, fields['at'] or now
  spent = math.max(0, come_back(kind, amount, period, spent, at) + used)
  redis.call('HSET', key, 'spent', string.format('%.6f', spent), 'at', string.format('%.6f', now))
  local free = amount - spent - held_by_others(key, fields) - held
  local granted = math.max(0, math.floor(math.min(wanted, free)))
  hold(key, held + granted, period)
  if kind == 'day' then
    return granted, period - now % period
  end
  return granted, math.max(0, 1 - free + granted) * period / amount
end

local reply = {}
for n, key in ipairs(KEYS) do
  local fields, flat, first = {}, redis.call('HGETALL', key), 6 * n - 3
  for m = 1, #flat, 2 do
    fields[flat[m]] = flat[m + 1]
  end
  local told = {}
  for m = 1, 5 do
    told[m] = tonumber(ARGV[first + m])
  end
  local granted, wait
  if ARGV[first] == 'slots' then
    granted, wait = seats(key, fields, told[1], told[3], told[4])
  else
    granted, wait = amounts(key, fields, ARGV[first], unpack(told))
  end
  reply[2 * n - 1], reply[2 * n] = granted, string.format('%.6f', wait)
end
return reply
