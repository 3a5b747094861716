//! The steps of a job as spans, sent to a real OpenTelemetry collector, which writes down what it got.

use std::process::{Command, Stdio};
use std::time::Duration;

use oxccl::core::deadline_in;
use oxccl::telemetry;

use crate::browser::free_port;
use crate::http::{Process, wait_until};
use crate::job::{Job, lighthouse};

/// A span as the collector wrote it.
struct Span {
    name: String,
    id: String,
    parent: String,
    text: String,
}

fn spans(log: &str) -> Vec<Span> {
    let field = |text: &str, name: &str| {
        let of = |line: &str| {
            Some(
                line.trim()
                    .strip_prefix(name)?
                    .trim_start()
                    .strip_prefix(':')?
                    .trim()
                    .to_string(),
            )
        };
        text.lines().find_map(of).unwrap_or_default()
    };
    log.split("Span #")
        .skip(1)
        .map(|text| Span {
            name: field(text, "Name"),
            id: field(text, "ID"),
            parent: field(text, "Parent ID"),
            text: text.to_string(),
        })
        .collect()
}

#[test]
fn a_collector_gets_the_steps_of_a_job_with_their_parts_and_a_heal() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let (port, other) = (free_port(), free_port());
    let collector = std::env::var_os("OXCCL_TEST_COLLECTOR")
        .expect("OXCCL_TEST_COLLECTOR: the row `observability` sets it to an OpenTelemetry collector");
    let output = std::fs::File::create(&log).unwrap();
    let _collector = Process(
        Command::new(collector)
            .arg("start")
            .args(["--otlp-grpc-endpoint", &format!("127.0.0.1:{port}")])
            .args(["--otlp-http-endpoint", &format!("127.0.0.1:{other}")])
            .args(["--exporter", "blackhole", "--debug-log", "traces"])
            .args(["--debug-log-verbosity", "detailed"])
            .stdout(output.try_clone().unwrap())
            .stderr(output)
            .stdin(Stdio::null())
            .spawn()
            .unwrap(),
    );
    wait_until("the collector listens", || {
        std::net::TcpStream::connect(("127.0.0.1", port)).ok()
    });
    let telemetry = telemetry::install_to(&format!("http://127.0.0.1:{port}")).unwrap();
    let server = lighthouse("127.0.0.1:0");
    let mut job = Job::new(&server);
    job.start("a");
    job.start("b");
    let read = || spans(&std::fs::read_to_string(&log).unwrap());
    let committed = |spans: &[Span], replica: &str| {
        let id = format!("oxccl.replica_id: Str({replica}:");
        let is =
            |s: &&Span| s.name == "step" && s.text.contains("oxccl.contributors") && s.text.contains(&id);
        spans.iter().filter(is).count()
    };
    wait_until("both replicas' steps arrive", || {
        let spans = read();
        (committed(&spans, "a") > 2 && committed(&spans, "b") > 2).then_some(())
    });
    job.kill("b");
    job.start("b");
    let heal = wait_until("the heal arrives", || {
        read().into_iter().find(|s| s.name == "heal")
    });
    for attribute in ["oxccl.sources", "oxccl.bytes", "oxccl.step", "oxccl.epoch"] {
        assert!(heal.text.contains(attribute), "{}", heal.text);
    }
    // Each part of an attempt lies in the attempt.
    for part in ["quorum", "configure", "vote", "heal"] {
        wait_until(part, || {
            let spans = read();
            let step = |id: &str| spans.iter().any(|s| s.name == "step" && s.id == id);
            spans
                .iter()
                .any(|s| s.name == part && step(&s.parent))
                .then_some(())
        });
    }
    drop(job);
    telemetry.shutdown(deadline_in(Duration::from_secs(20))).unwrap();
}
