// pg-boss in batches of 1000, woken by notifications and going on at once while batches are full.
const { PgBoss } = require('pg-boss')
const { counter, stamp, paced, timed, inBulk, main } = require('./common.cjs')

function boss (dsn, options) {
  const made = new PgBoss({ connectionString: dsn, max: 10, ...options })
  made.on('error', error => console.error(error))
  return made
}

async function producing (dsn, use) {
  const producer = boss(dsn, { supervise: false, schedule: false })
  await producer.start()
  return use(producer)
}

async function work (dsn, handle) {
  const worker = boss(dsn, { useListenNotify: true })
  await worker.start()
  const options = { batchSize: 1000, localConcurrency: 2, pollingIntervalSeconds: 0.5, burstWhenBatchFull: true }
  await worker.work('noop', options, async (jobs) => { for (const job of jobs) handle(job.data) })
  await new Promise(() => {})
}

main({
  install: async (dsn) => {
    const installer = boss(dsn, {})
    await installer.start()
    await installer.createQueue('noop', { notify: true })
    return { installed: true }
  },
  bulk: (dsn, count) => producing(dsn, producer => timed(() => inBulk(count, size =>
    producer.insert('noop', Array.from({ length: size }, () => ({ data: {} })))))),
  work: (dsn, count) => work(dsn, counter(count)),
  stamp: (dsn) => work(dsn, data => stamp(data.number)),
  paced: (dsn, count, perSecond) => producing(dsn, producer => paced(count, perSecond, number => producer.send('noop', { number })))
})
