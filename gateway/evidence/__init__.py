"""What requests say of two versions of a model: samples, measures and verdicts. Pure.

statistics   samples, distributions and intervals
sources      what usage rows, an access log or a page of metrics say of the versions of a model
versions     two versions of a traffic split, measure by measure, and the report
experiments  all traffic splits of a configuration, for the admin listener
rollout      what a guarded rollout decides; its state: rollout_store, rollout_postgres,
             rollout_redis
observation  what is measured of one recorded request
recordings   two recordings, in pairs or as a whole, and the report
"""
