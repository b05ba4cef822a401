// graphile-worker with its local queue and batched completion, as its pages on performance recommend.
const { run, runMigrations, makeWorkerUtils, Logger } = require('graphile-worker')
const { counter, stamp, paced, timed, inBulk, main } = require('./common.cjs')

const logger = new Logger(() => () => {})

async function withUtils (dsn, use) {
  const utils = await makeWorkerUtils({ connectionString: dsn, logger })
  try { return await use(utils) } finally { await utils.release() }
}

async function work (dsn, handler) {
  const worker = {
    connectionString: dsn, concurrentJobs: 24, maxPoolSize: 10, logger,
    localQueue: { size: 500 }, completeJobBatchDelay: 0, failJobBatchDelay: 0,
    crontabFile: '/nonexistent', taskDirectory: '/nonexistent'
  }
  const runner = await run({ preset: { worker }, taskList: { noop: handler }, crontab: '', noHandleSignals: true })
  await runner.promise
}

main({
  install: (dsn) => runMigrations({ connectionString: dsn, logger }),
  bulk: (dsn, count) => withUtils(dsn, utils => timed(() => inBulk(count, size =>
    utils.addJobs(Array.from({ length: size }, () => ({ identifier: 'noop', payload: {} })))))),
  work: (dsn, count) => { const hit = counter(count); return work(dsn, async () => { hit() }) },
  stamp: (dsn) => work(dsn, async (payload) => { stamp(payload.number) }),
  paced: (dsn, count, perSecond) => withUtils(dsn, utils => paced(count, perSecond, number => utils.addJob('noop', { number })))
})
