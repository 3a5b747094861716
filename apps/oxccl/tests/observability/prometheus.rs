//! The metrics of a running job: checked by promtool, scraped and asked for in a real Prometheus.

use std::io::Write;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::browser::free_port;
use crate::http::{Process, get, request, wait_until};
use crate::job::{Job, lighthouse};

/// promtool's opinion of a page of metrics; it complains of a missing HELP, a bad name or a unit that is none.
fn check(url: &str) {
    let metrics = get(url);
    let mut promtool = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("promtool: the row `observability` installs it");
    promtool
        .stdin
        .take()
        .unwrap()
        .write_all(metrics.as_bytes())
        .unwrap();
    let output = promtool.wait_with_output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    assert!(
        output.status.success() && said.trim().is_empty(),
        "{url}: {said}\n{metrics}"
    );
    for line in metrics.lines().filter(|l| !l.starts_with('#')) {
        assert!(line.starts_with("oxccl_"), "{line}");
    }
}

#[test]
fn a_prometheus_that_finds_the_replicas_at_the_lighthouse_answers_for_their_job() {
    let server = lighthouse("127.0.0.1:0");
    let mut job = Job::new(&server);
    job.start("a");
    job.start("b");
    let targets = || -> Vec<String> {
        let found: Value = serde_json::from_str(&get(&format!("{}/targets", server.address()))).unwrap();
        let found = found.as_array().unwrap().iter();
        found
            .map(|t| t["targets"][0].as_str().unwrap().to_string())
            .collect()
    };
    let replicas = wait_until("both replicas are in a quorum", || {
        Some(targets()).filter(|t| t.len() == 2)
    });
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("prometheus.yml");
    let address = server.address();
    let host = address.strip_prefix("http://").unwrap();
    std::fs::write(
        &config,
        format!(
            "global: {{scrape_interval: 200ms, scrape_timeout: 200ms}}\nscrape_configs:\n- job_name: lighthouse\n  static_configs: [{{targets: ['{host}']}}]\n\
             - job_name: replicas\n  http_sd_configs: [{{url: '{address}/targets', refresh_interval: 1s}}]\n"
        ),
    )
    .unwrap();
    let port = free_port();
    let log = std::fs::File::create(folder.path().join("log")).unwrap();
    let _prometheus = Process(
        Command::new("prometheus")
            .arg(format!("--config.file={}", config.display()))
            .arg(format!(
                "--storage.tsdb.path={}",
                folder.path().join("data").display()
            ))
            .arg(format!("--web.listen-address=127.0.0.1:{port}"))
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("prometheus: the row `observability` installs it"),
    );
    // Brackets and spaces have no place in a URL.
    let ask = |query: &str| -> Option<f64> {
        let plain: String = query
            .bytes()
            .map(|b| match b {
                b if b.is_ascii_alphanumeric() || b"_().".contains(&b) => (b as char).to_string(),
                b => format!("%{b:02X}"),
            })
            .collect();
        let url = format!("http://127.0.0.1:{port}/api/v1/query?query={plain}");
        let (status, answer) = request("GET", &url, None).ok()?;
        let answer: Value = serde_json::from_str(&answer).ok()?;
        assert!(status == 200 || status == 503, "{query}: {answer}");
        answer["data"]["result"][0]["value"][1].as_str()?.parse().ok()
    };
    let holds = |query: &str, right: &dyn Fn(f64) -> bool| {
        let mut last = None;
        wait_until(query, || {
            last = ask(query);
            last.filter(|value| right(*value)).map(|_| ())
        });
    };
    holds("count(up{job=\"replicas\"} == 1)", &|n| n == 2.0);
    holds("oxccl_lighthouse_participants", &|n| n == 2.0);
    // Of each replica its rank: steps, collectives and bytes that go on, and the time of a step in seconds.
    holds(
        "count(rate(oxccl_rank_commits_total{rank=\"0\"}[5s]) > 1)",
        &|n| n == 2.0,
    );
    holds("min(rate(oxccl_rank_collective_bytes_total[5s]))", &|n| {
        n > 1024.0
    });
    holds("min(rate(oxccl_rank_sent_bytes_total[5s]))", &|n| n > 100.0);
    holds(
        "max(rate(oxccl_rank_step_seconds_sum[5s]) / rate(oxccl_rank_step_seconds_count[5s]))",
        &|s| s > 0.0 && s < 5.0,
    );
    check(&format!("{address}/metrics"));
    for replica in &replicas {
        check(&format!("http://{replica}/metrics"));
    }
    // A death, and a new replica in another place, which is found there.
    job.kill("b");
    holds("oxccl_lighthouse_deaths_total", &|n| n == 1.0);
    job.start("b");
    holds("sum(oxccl_rank_heals_total{replica=\"b\"})", &|n| n == 1.0);
    holds("oxccl_lighthouse_heals_total", &|n| n >= 1.0);
    holds(
        "sum(oxccl_rank_discards_total + oxccl_rank_failures_total)",
        &|n| n >= 0.0,
    );
    wait_until("the new replica is discovered", || {
        let now = targets();
        (now.len() == 2 && now != replicas).then_some(())
    });
    check(&format!("{address}/metrics"));
}
