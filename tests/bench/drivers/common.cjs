// What the Node drivers share. A driver is called as: driver.cjs COMMAND DSN [NUMBER] [PER_SECOND] and answers with one
// JSON line; `work` answers once NUMBER jobs were handled, with when the first and each quarter of them were.
const now = () => (performance.timeOrigin + performance.now()) / 1000

function counter (expected) {
  const marks = []
  let handled = 0
  return () => {
    handled++
    if (handled === 1 || handled >= expected * marks.length / 4) marks.push([now(), handled])
    if (handled === expected) console.log(JSON.stringify({ marks }))
  }
}

// Every handler says when it began; the line is written at once, the clock was read before.
const stamp = (number) => process.stdout.write(`${JSON.stringify({ number, at: now() })}\n`)

async function paced (count, perSecond, send) {
  const sent = {}
  const began = now()
  for (let number = 0; number < count; number++) {
    const wait = began + number / perSecond - now()
    if (wait > 0) await new Promise(resolve => setTimeout(resolve, wait * 1000))
    await send(number)
    sent[number] = now()
  }
  return { sent }
}

async function timed (work) {
  const began = now()
  await work()
  return { seconds: now() - began }
}

async function inBulk (count, insert) {
  for (let start = 0; start < count; start += 1000) await insert(Math.min(1000, count - start))
}

function main (commands) {
  const [command, dsn, number, perSecond] = process.argv.slice(2)
  commands[command](dsn, Number(number), Number(perSecond)).then(
    answer => { if (answer) { console.log(JSON.stringify(answer)); process.exit(0) } },
    error => { console.error(error); process.exit(1) })
}

module.exports = { now, counter, stamp, paced, timed, inBulk, main }
