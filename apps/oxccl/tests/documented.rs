//! The commands of the documentation: `oxccl` knows each that a document names, and does what it should.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs::Permissions;
use std::io::{BufRead as _, BufReader};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use documents::{Documented, documented, root, unknown};
use oxccl::coordination::{LighthouseConfig, LighthouseServer};
use oxccl::core::flight_recorder::dump_to;
use oxccl::core::{
    Configuration, Epoch, FileStore, GroupOptions, ProcessGroup as _, ProcessGroupExt as _, ReduceOp, Tensor,
    deadline_in,
};
use oxccl::gloo::GlooGroup;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// Whole commands that are not run here, by what stands in them, and why not.
const NOT_RUN: &[(&str, &str)] = &[
    (
        "--backend nccl",
        "needs a GPU; the row `nccl` measures over the stand-in",
    ),
    ("--backend xccl", "needs oneCCL; the rows `xccl` have it"),
    ("--etcd", "needs etcd; the row `etcd` has it"),
    ("acme", "needs that plugin; tests/new_plugins.rs makes it"),
    (
        "-- train_diloco replica",
        "needs that program; examples/tests/machines.rs runs such commands of the documents",
    ),
    (
        "replica evict replica0",
        "needs a job that trains; examples/tests/machines.rs gives this order",
    ),
    (
        "trace dump",
        "needs a process that hangs; tests/trace.rs asks one",
    ),
    (
        "replica drain replica1",
        "needs a job that trains; examples/tests/machines.rs gives this order",
    ),
];

/// How a command is run.
enum How {
    /// It ends with this exit code.
    Ends(i32),
    /// It serves a job: it is asked what the job waits for, and then to end.
    Serves,
    /// Both nodes of a job, at once.
    Nodes,
}

use How::{Ends, Nodes, Serves};

/// How a command begins, what is done before it, what is added to it so that it takes a moment only, and how it is run.
const RUN: &[(&str, &str, &str, How)] = &[
    ("backends", "", "", Ends(0)),
    ("bench --op", "", "--iters 1 --warmup 0", Ends(0)),
    ("bench --option", "", "--iters 1 --warmup 0 --sizes 4", Ends(0)),
    // Each document begins with a folder of its own.
    ("credentials new", "rm -rf job1 job1-*", "", Ends(0)),
    (
        "plan --parameters 10B",
        r#"printf '{"hosts": [{"name": "a", "count": 3, "ranks": 2}], "local": {"rate": 1e11}, "between": {"rate": 1e9}}' > links.json"#,
        "",
        Ends(0),
    ),
    ("plan", "", "", Ends(0)),
    ("credentials issue", "", "", Ends(0)),
    ("credentials show", "", "", Ends(0)),
    (
        "credentials revoke",
        "oxccl credentials issue --for lighthouse job1 job1-lighthouse",
        "",
        Ends(0),
    ),
    ("launch --nnodes 2", "", "", Nodes),
    ("launch", "", "", Ends(0)),
    (
        "lighthouse --credentials job1,job2",
        "oxccl credentials new job2",
        "",
        Serves,
    ),
    ("lighthouse", "", "", Serves),
    ("trace merge", "", "", Ends(0)),
    // The lighthouse that it asks has no job.
    ("why", "", "", Ends(1)),
];

/// Generous: only a hang reaches it.
const LONG: Duration = Duration::from_secs(100);

/// What follows `oxccl` between backticks where no command is meant: words of the keys' derivation (docs/credentials-data-plane.md).
const LABELS: &[&str] = &["listener", "caller", "data", "record", "records"];

/// The documents' commands of this program, with where they stand.
fn ours() -> Vec<(String, Documented)> {
    let mut found = Vec::new();
    for (path, text) in documents::all().unwrap() {
        let is_label = |c: &Documented| c.words.get(1).is_some_and(|w| LABELS.contains(&w.as_str()));
        let commands = documented(&text)
            .into_iter()
            .filter(|c| c.words[0] == "oxccl" && (c.is_whole || !is_label(c)));
        found.extend(commands.map(|c| (format!("{path}:{}", c.line), c)));
    }
    assert!(found.len() > 40, "only {} commands were found", found.len());
    found
}

#[test]
fn every_documented_command_and_option_is_there() {
    let grammar = oxccl_cli::grammar();
    let mut wrong = Vec::new();
    for (place, command) in ours() {
        wrong.extend(unknown(&grammar, &command.words[1..]).map(|text| format!("{place}: {text}")));
        if command.is_whole {
            // A variable of the shell stands for a number.
            let words = command
                .words
                .iter()
                .map(|w| if w.starts_with('$') { "0" } else { w.as_str() });
            let parsed = grammar.clone().try_get_matches_from(words);
            wrong.extend(parsed.err().map(|e| format!("{place}: {e}")));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The folder in which the commands are run, with what they name in it.
struct Place {
    folder: TempDir,
    path: String,
    lighthouse: LighthouseServer,
}

impl Place {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        for program in ["program", "train"] {
            let file = folder.path().join(program);
            std::fs::write(&file, "#!/bin/sh\ntest -n \"$OXCCL_REPLICA\"\n").unwrap();
            std::fs::set_permissions(&file, Permissions::from_mode(0o755)).unwrap();
        }
        record(folder.path());
        let bin = Path::new(env!("CARGO_BIN_EXE_oxccl")).parent().unwrap();
        let lighthouse = LighthouseServer::start(LighthouseConfig {
            bind: "127.0.0.1:0".into(),
            ..LighthouseConfig::default()
        });
        Self {
            folder,
            path: format!("{}:{}", bin.display(), std::env::var("PATH").unwrap()),
            lighthouse: lighthouse.unwrap(),
        }
    }

    /// The words with addresses that are free here, and sizes that take a moment.
    fn here(&self, words: &[String], rendezvous: &str) -> String {
        let word = |word: &String| match word.as_str() {
            "http://host:29510" => self.lighthouse.address(),
            "127.0.0.1:29510" => "127.0.0.1:0".into(),
            "node0:29500" => rendezvous.into(),
            "64M" => "4K".into(),
            _ => word.clone(),
        };
        words.iter().map(word).collect::<Vec<_>>().join(" ")
    }

    /// `sh` with a script, ended with all that it started after a while.
    fn command(&self, script: &str) -> Command {
        let mut command = Command::new("timeout");
        command
            .arg(LONG.as_secs().to_string())
            .args(["sh", "-c", script])
            .current_dir(self.folder.path())
            .env("PATH", &self.path)
            .env("TMPDIR", self.folder.path())
            .stdin(Stdio::null());
        for variable in ["LIGHTHOUSE", "CREDENTIALS", "INSECURE", "LOG", "ENCRYPT"] {
            command.env_remove(format!("OXCCL_{variable}"));
        }
        command
    }

    fn ends(&self, place: &str, script: &str, code: i32) {
        let output = self.command(script).output().unwrap();
        let err = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{place}: {script}\n{err}");
    }

    /// The command as node 0 and as node 1.
    fn nodes(&self, place: &str, words: &[String]) {
        let rendezvous = format!("127.0.0.1:{}", free_pair());
        let node = |rank: &str| {
            let at = words.iter().position(|w| w == "--node-rank").unwrap() + 1;
            let mut words = words.to_vec();
            words[at] = rank.into();
            let mut command = self.command(&self.here(&words, &rendezvous));
            command
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        };
        for child in ["0", "1"].map(node) {
            let output = child.wait_with_output().unwrap();
            let err = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{place}: {}\n{err}", words.join(" "));
        }
    }

    /// A lighthouse: it is asked what its job waits for, and ends in order when it is told to.
    fn serves(&self, place: &str, words: &[String]) {
        let bound = words.iter().any(|w| w == "--bind");
        let free = if bound { "" } else { "--bind 127.0.0.1:0" };
        let mut child = self
            .command(&format!("exec {} {free}", self.here(words, "")))
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap())
            .lines()
            .map(Result::unwrap);
        let url = lines.find_map(|line| {
            let (_, rest) = line.split_once("lighthouse at ")?;
            rest.split(' ').next().map(str::to_owned)
        });
        let url = url.unwrap_or_else(|| panic!("{place}: no lighthouse: {:?}", child.wait()));
        let with = if url.starts_with("https:") {
            "--credentials job1"
        } else {
            ""
        };
        self.ends(place, &format!("oxccl why {url} {with}"), 1);
        // `timeout` passes it on.
        kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
        let rest: Vec<String> = lines.collect();
        assert_ne!(child.wait().unwrap().code(), Some(124), "{place}: {rest:?}");
        assert!(
            rest.iter()
                .any(|line| line.contains("lighthouse ends (signal 15)")),
            "{place}: {rest:?}"
        );
    }
}

/// The flight record of a process whose group went well, in `records`.
fn record(folder: &Path) {
    let group = GlooGroup::new("dp", GroupOptions::default()).unwrap();
    let configuration = Configuration {
        store: Arc::new(FileStore::open(folder.join("store")).unwrap()),
        prefix: "documented".into(),
        name: "dp".into(),
        epoch: Epoch(1),
        rank: 0,
        world_size: 1,
        deadline: deadline_in(LONG),
        cancel: Default::default(),
    };
    group.configure(configuration).unwrap();
    let work = group
        .all_reduce(Tensor::from_vec(vec![1_f32; 8]), ReduceOp::Sum)
        .unwrap();
    work.wait_done().unwrap();
    dump_to(&folder.join("records"), "a test asks for it").unwrap();
}

/// A port that was free a moment ago together with the next one.
fn free_pair() -> u16 {
    let listen = |port| TcpListener::bind(("127.0.0.1", port)).ok();
    let found = (0..1000).find_map(|_| {
        let first = listen(0)?;
        let port = first.local_addr().ok()?.port();
        listen(port.checked_add(1)?).map(|_| port)
    });
    found.unwrap()
}

/// The files in `deploy/` start the command in forms of their own: `exec oxccl launch …` of a shell, and a list with an item for each argument.
#[test]
fn the_jobs_ready_to_use_give_options_that_are_there() {
    let folder = root().join("deploy");
    let text = |file: &str| std::fs::read_to_string(folder.join(file)).unwrap();
    let of_a_shell = |file: &str| -> Vec<String> {
        let text = text(file);
        let (_, command) = text.split_once("exec oxccl ").unwrap();
        let words = command.split_whitespace().filter(|word| *word != "\\");
        words
            .map(|word| word.trim_matches('"').to_owned())
            .take_while(|word| word != "--")
            .collect()
    };
    let listed = text("kubernetes/lighthouse.yaml");
    let (_, list) = listed.split_once("- oxccl\n").unwrap();
    let items = list.lines().map_while(|line| line.trim().strip_prefix("- "));
    let grammar = oxccl_cli::grammar();
    for (file, words) in [
        ("slurm/replicas.sbatch", of_a_shell("slurm/replicas.sbatch")),
        ("kubernetes/replicas.yaml", of_a_shell("kubernetes/replicas.yaml")),
        ("kubernetes/lighthouse.yaml", items.map(str::to_owned).collect()),
    ] {
        assert!(words.len() > 5, "{file}: {words:?}");
        assert_eq!(unknown(&grammar, &words), None, "{file}");
    }
}

#[test]
fn documented_commands_do_what_they_should() {
    let here = Place::new();
    let (mut ran, mut left) = (0, Vec::new());
    for (place, command) in ours().into_iter().filter(|(_, command)| command.is_whole) {
        let rest = command.words[1..].join(" ");
        if let Some((what, _)) = NOT_RUN.iter().find(|(what, _)| rest.contains(what)) {
            left.push(*what);
            continue;
        }
        let run = RUN
            .iter()
            .find(|(begins, ..)| format!("{rest} ").starts_with(begins));
        let (_, before, more, how) = run.unwrap_or_else(|| {
            panic!(
                "{place}: 'oxccl {rest}' is neither run nor has a reason why not: add it to RUN or NOT_RUN"
            )
        });
        here.ends(&place, before, 0);
        match how {
            Ends(code) => here.ends(
                &place,
                &format!("{} {more}", here.here(&command.words, "")),
                *code,
            ),
            Serves => here.serves(&place, &command.words),
            Nodes => here.nodes(&place, &command.words),
        }
        ran += 1;
    }
    assert!(ran >= 25, "{ran} were run");
    for (what, _) in NOT_RUN {
        assert!(
            left.contains(what),
            "no document has '{what}': take it out of NOT_RUN"
        );
    }
}
