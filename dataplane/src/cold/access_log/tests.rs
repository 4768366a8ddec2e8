use std::sync::{Arc, Mutex};
use std::time::UNIX_EPOCH;

use super::*;
use crate::fixture;

fn names() -> Current<Names> {
    Current::new(fixture::names())
}

fn record(n: u64) -> AccessRecord {
    AccessRecord {
        request_id: u128::from(n).to_be_bytes(),
        ended: Now::from_nanos(1_500_000_000),
        duration_ns: 12_345_678,
        first_byte_ns: 2_000_999,
        bytes_out: 1 << 40,
        bytes_in: 77,
        model: ModelIndex::new(0),
        provider: ProviderIndex::new(0),
        status: 200,
        operation: Some(Operation::ChatCompletions),
        reason: None,
    }
}

/// Where lines go; a test may hold the writer back by holding the lock.
#[derive(Clone, Default)]
struct Sheet(Arc<Mutex<Vec<u8>>>);

impl Write for Sheet {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Sheet {
    fn lines(&self) -> Vec<serde_json::Value> {
        let text = String::from_utf8(self.0.lock().unwrap().clone()).unwrap();
        assert!(text.is_empty() || text.ends_with('\n'));
        text.lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }
}

fn spawn(choice: Choice, shards: usize, sheet: &Sheet) -> (AccessLog, Vec<AccessSink>) {
    let started = UNIX_EPOCH + Duration::from_secs(1_709_164_799);
    AccessLog::spawn(choice, shards, names(), started, Box::new(sheet.clone())).unwrap()
}

#[test]
fn a_record_becomes_one_line_with_configured_names() {
    let sheet = Sheet::default();
    let (log, mut sinks) = spawn(Choice::All, 2, &sheet);
    assert_eq!(sinks[1].record(record(0xabc)), Recorded::Sent);
    let refused = AccessRecord {
        model: None,
        provider: None,
        status: 404,
        operation: None,
        first_byte_ns: AccessRecord::NEVER,
        reason: Some(Reason::RouteUnknown),
        ..record(1)
    };
    assert_eq!(sinks[0].record(refused), Recorded::Sent);
    log.stop();
    let mut lines = sheet.lines();
    lines.sort_by_key(|line| line["status"].as_u64());
    let expected = serde_json::json!({
        "time": "2024-02-29T00:00:00.500Z", "event": "access",
        "request_id": "00000000000000000000000000000abc", "operation": "chat_completions",
        "model": "say \"hi\"", "provider": "pv1", "node": "n1", "status": 200,
        "bytes_in": 77, "bytes_out": 1_u64 << 40, "first_byte_us": 2_000,
        "duration_us": 12_345, "outcome": "ok",
    });
    assert_eq!(lines[0], expected);
    assert_eq!(lines[1]["outcome"], "route_unknown");
    for absent in ["model", "provider", "node", "operation", "first_byte_us"] {
        assert!(lines[1][absent].is_null(), "{absent}");
    }
    assert_eq!(lines.len(), 2);
}

#[test]
fn a_sample_takes_one_in_n_and_off_takes_none() {
    let sheet = Sheet::default();
    let (log, mut sinks) = spawn(Choice::Sampled(3), 1, &sheet);
    let sent = (0..10)
        .filter(|&n| sinks[0].record(record(n)) == Recorded::Sent)
        .count();
    log.stop();
    let ids: Vec<_> = sheet
        .lines()
        .iter()
        .map(|line| line["request_id"].clone())
        .collect();
    let expected = [0, 3, 6, 9].map(|n| format!("{n:032x}"));
    assert_eq!((sent, ids), (4, expected.map(Into::into).to_vec()));

    let (log, mut sinks) = spawn(Choice::Off, 2, &Sheet::default());
    assert_eq!(sinks.len(), 2);
    assert_eq!(sinks[1].record(record(0)), Recorded::Skipped);
    log.stop();
}

#[test]
fn a_writer_that_is_held_up_costs_lines_and_nothing_else() {
    let sheet = Sheet::default();
    let (log, mut sinks) = spawn(Choice::All, 1, &sheet);
    let mut sent = 0_u64;
    {
        let _held = sheet.0.lock().unwrap();
        // The writer may take one lane's worth before it meets the lock, and then no more.
        let more = 3 * ACCESS_SLOTS as u64;
        let (calls, outcomes) = alloc::heap_calls(|| {
            let mut outcomes = [0_u64; 3];
            for n in 0..more {
                outcomes[sinks[0].record(record(n)) as usize] += 1;
            }
            outcomes
        });
        assert_eq!(calls, 0, "a shard pays no heap call for a line");
        assert!(outcomes[Recorded::Dropped as usize] >= ACCESS_SLOTS as u64);
        sent += outcomes[Recorded::Sent as usize];
        assert!(sent >= ACCESS_SLOTS as u64);
        assert_eq!(outcomes[Recorded::Skipped as usize], 0);
    }
    log.stop();
    assert_eq!(
        sheet.lines().len() as u64,
        sent,
        "what was sent before the stop is written"
    );
}

#[test]
fn lines_appear_while_the_edge_runs() {
    struct Signal(Sender<Vec<u8>>);
    impl Write for Signal {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.send(bytes.to_vec()).map_err(io::Error::other)?;
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let (seen, lines) = bounded(16);
    let (log, mut sinks) =
        AccessLog::spawn(Choice::All, 1, names(), UNIX_EPOCH, Box::new(Signal(seen))).unwrap();
    for n in 0..3 {
        // Each finds the writer asleep or about to sleep; a lost wake-up would end in the deadline.
        assert_eq!(sinks[0].record(record(n)), Recorded::Sent);
        let line = lines
            .recv_timeout(Duration::from_secs(10))
            .expect("a line without a stop");
        assert!(line.ends_with(b"\n"));
    }
    log.stop();
}

#[test]
fn a_sink_that_fails_ends_nothing() {
    struct Broken;
    impl Write for Broken {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::BrokenPipe.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let (log, mut sinks) =
        AccessLog::spawn(Choice::All, 1, names(), UNIX_EPOCH, Box::new(Broken)).unwrap();
    assert_eq!(sinks[0].record(record(1)), Recorded::Sent);
    log.stop();
    assert!(
        matches!(sinks[0].record(record(2)), Recorded::Sent),
        "the shard notices nothing"
    );
}

#[test]
fn dates_are_civil() {
    let at =
        |seconds, ms| utc(UNIX_EPOCH + Duration::from_secs(seconds) + Duration::from_millis(ms));
    assert_eq!(at(0, 0), "1970-01-01T00:00:00.000Z");
    assert_eq!(at(951_782_400, 1), "2000-02-29T00:00:00.001Z");
    assert_eq!(at(951_868_800, 0), "2000-03-01T00:00:00.000Z");
    assert_eq!(at(1_735_689_599, 999), "2024-12-31T23:59:59.999Z");
    assert_eq!(at(4_107_542_400, 0), "2100-03-01T00:00:00.000Z");
    assert_eq!(
        utc(UNIX_EPOCH - Duration::from_secs(5)),
        "1970-01-01T00:00:00.000Z"
    );
}
