//! The requests with curl that the documentation names, to real lighthouses.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use crate::http::Process;
use crate::job::lighthouse;

/// A document, and a part of what each of its requests is answered with, in their order.
const REQUESTS: &[(&str, &[&str])] = &[
    (
        "observability.md",
        &["data: {", "oxccl_lighthouse_participants 0"],
    ),
    ("credentials.md", &["\"participants\""]),
];

/// Runs `words` until they have printed a line with `part`: a stream of events goes on.
fn asks(folder: &Path, words: &[String], part: &str) {
    let mut command = Command::new(&words[0]);
    // An answer that does not come ends the test.
    command
        .args(["--silent", "--show-error", "--max-time", "60"])
        .args(&words[1..]);
    let child = command.current_dir(folder).stdout(Stdio::piped()).spawn();
    let mut child = Process(child.expect("curl: the row `observability` installs it"));
    let lines = BufReader::new(child.0.stdout.take().unwrap())
        .lines()
        .map(Result::unwrap);
    let mut said = String::new();
    let found = lines
        .inspect(|line| said += &format!("{line}\n"))
        .any(|line| line.contains(part));
    assert!(found, "{words:?}: no '{part}' in:\n{said}");
}

#[test]
fn the_requests_of_the_documents_are_answered() {
    let folder = tempfile::tempdir().unwrap();
    let open = lighthouse("127.0.0.1:0");
    let open = open.address().replace("http://", "");
    let program = env!("CARGO_BIN_EXE_oxccl");
    let made = Command::new(program)
        .args(["credentials", "new", "job1"])
        .current_dir(&folder)
        .status();
    assert!(made.unwrap().success());
    let options = ["lighthouse", "--credentials", "job1", "--bind", "127.0.0.1:0"];
    let child = Command::new(program)
        .args(options)
        .current_dir(&folder)
        .stderr(Stdio::piped())
        .spawn();
    let mut closed = Process(child.unwrap());
    let lines = BufReader::new(closed.0.stderr.take().unwrap())
        .lines()
        .map(Result::unwrap);
    let address = |line: String| {
        Some(
            line.split_once("lighthouse at https://")?
                .1
                .split(' ')
                .next()?
                .to_owned(),
        )
    };
    let mut lines = lines;
    let secured = lines.find_map(address).expect("a lighthouse says where it is");
    let job = std::fs::read_to_string(folder.path().join("job1/job")).unwrap();
    for (document, parts) in REQUESTS {
        let path = documents::root().join("docs").join(document);
        let commands = documents::documented(&std::fs::read_to_string(path).unwrap());
        let requests: Vec<_> = commands.iter().filter(|c| c.words[0] == "curl").collect();
        assert_eq!(requests.len(), parts.len(), "{document}: {requests:?}");
        for (request, part) in requests.iter().zip(*parts) {
            let here = |word: &String| {
                word.replace("127.0.0.1:29510", &open)
                    .replace("hostA:29510", &secured)
                    .replace("JOB", job.trim())
            };
            let words: Vec<String> = request.words.iter().map(here).collect();
            asks(folder.path(), &words, part);
        }
    }
}
