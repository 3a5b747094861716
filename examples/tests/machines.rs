//! The recipes for several machines, run as the documents have them: each machine is a folder of its own on this host.
//!
//! A recipe is read out of its document, the machines' names are replaced by an address of this host, and the run is cut short. `oxccl` is this
//! program under that name.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::ffi::OsString;
use std::fs::File;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Failed, Trial};
use tempfile::TempDir;

/// Generous: only a hang reaches it.
const LONG: Duration = Duration::from_secs(150);
/// A model and a rhythm small enough for a test.
const SMALL: &str = "--sync-every 4 --d-model 16 --layers 1 --seq 16 --batch 1";

fn main() -> ExitCode {
    let mut arguments = std::env::args_os();
    let name = arguments.next().unwrap_or_default();
    if Path::new(&name).file_name().is_some_and(|name| name == "oxccl") {
        oxccl::backend::init();
        let code = oxccl_cli::run(std::iter::once(name).chain(arguments), vec!["oxccl".into()]);
        return ExitCode::from(code);
    }
    let test = |name: &str, body: fn()| {
        Trial::test(name, move || {
            body();
            Ok::<(), Failed>(())
        })
    };
    let tests = vec![
        test(
            "the_readmes_two_machines_train_and_end_with_the_same_parameters",
            readme,
        ),
        test(
            "an_operator_evicts_and_drains_replicas_of_two_machines_with_the_documented_orders",
            orders,
        ),
    ];
    libtest_mimic::run(&Arguments::from_args(), tests).exit_code()
}

/// The commands of a part of a document, from the heading `heading` to the next one of its kind.
fn section(document: &str, heading: &str) -> Vec<Vec<String>> {
    let text = std::fs::read_to_string(documents::root().join(document)).unwrap();
    let (_, after) = text.split_once(&format!("\n## {heading}\n")).expect(heading);
    let part = after.split("\n## ").next().unwrap();
    documents::documented(part)
        .into_iter()
        .map(|c| c.words)
        .filter(|words| words[0] == "oxccl")
        .collect()
}

/// All commands that begin so and have more to them.
fn all(commands: &[Vec<String>], begin: &str) -> Vec<Vec<String>> {
    let begin: Vec<&str> = begin.split(' ').collect();
    let fits =
        |words: &&Vec<String>| words.len() > begin.len() && words.iter().zip(&begin).all(|(w, b)| w == b);
    commands.iter().filter(fits).cloned().collect()
}

/// The command that begins so.
fn one(commands: &[Vec<String>], begin: &str) -> Vec<String> {
    let found = all(commands, begin);
    assert_eq!(found.len(), 1, "{begin}: {found:?}");
    found.concat()
}

fn with(mut words: Vec<String>, more: &str) -> Vec<String> {
    words.extend(more.split(' ').map(str::to_owned));
    words
}

/// A process that is killed and collected when it is dropped, with what it says in a file.
struct Process {
    child: Child,
    said: PathBuf,
}

impl Process {
    fn said(&self) -> String {
        std::fs::read_to_string(&self.said).unwrap()
    }

    /// Waits until it has said `text`; gives what stands behind it, up to the next space.
    fn says(&mut self, text: &str) -> String {
        let end = Instant::now() + LONG;
        loop {
            let said = self.said();
            if let Some((_, rest)) = said.split_once(text)
                && let Some((word, _)) = rest.split_once(char::is_whitespace)
            {
                return word.to_owned();
            }
            let status = self.child.try_wait().unwrap();
            assert!(
                status.is_none() && Instant::now() < end,
                "no '{text}' ({status:?}): {said}"
            );
            std::thread::park_timeout(Duration::from_millis(20));
        }
    }

    fn ends(&mut self) -> ExitStatus {
        let end = Instant::now() + LONG;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < end, "it does not end: {}", self.said());
            std::thread::park_timeout(Duration::from_millis(20));
        }
    }

    /// Asks it to end, and waits until it has.
    fn ended(mut self) -> ExitStatus {
        let asked = Command::new("kill").arg(self.child.id().to_string()).status();
        assert!(asked.unwrap().success());
        self.ends()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Two machines, with the programs on the path of both.
struct Machines {
    dir: TempDir,
    path: OsString,
}

impl Machines {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let programs = dir.path().join("programs");
        for folder in ["programs", "a", "b"] {
            std::fs::create_dir(dir.path().join(folder)).unwrap();
        }
        symlink(std::env::current_exe().unwrap(), programs.join("oxccl")).unwrap();
        symlink(env!("CARGO_BIN_EXE_train_diloco"), programs.join("train_diloco")).unwrap();
        let before = std::env::var_os("PATH").unwrap();
        let path = std::env::join_paths(std::iter::once(programs).chain(std::env::split_paths(&before)));
        Self {
            dir,
            path: path.unwrap(),
        }
    }

    fn command(&self, machine: &str, words: &[String]) -> Command {
        let mut command = Command::new(self.dir.path().join("programs").join(&words[0]));
        command
            .args(&words[1..])
            .current_dir(self.dir.path().join(machine))
            .env("PATH", &self.path)
            .env("XDG_STATE_HOME", self.dir.path().join(machine))
            .stdin(Stdio::null());
        for variable in ["LIGHTHOUSE", "CREDENTIALS", "INSECURE", "LOG", "ENCRYPT"] {
            command.env_remove(format!("OXCCL_{variable}"));
        }
        command
    }

    fn start(&self, machine: &str, words: &[String]) -> Process {
        let said = self.dir.path().join(machine).join(format!("{}.said", words[1]));
        let file = File::create(&said).unwrap();
        let mut command = self.command(machine, words);
        command.stdout(file.try_clone().unwrap()).stderr(file);
        let child = command.spawn().unwrap();
        Process { child, said }
    }

    fn output(&self, machine: &str, words: &[String]) -> (Output, String) {
        let output = self.command(machine, words).output().unwrap();
        let (out, err) = (&output.stdout, &output.stderr);
        let text = format!("{}{}", String::from_utf8_lossy(out), String::from_utf8_lossy(err));
        (output, text)
    }

    /// Makes the credentials on the first machine, and copies the folder that was made last to the other one.
    fn credentials(&self, recipe: &[Vec<String>]) {
        let mut made = None;
        for words in all(recipe, "oxccl credentials") {
            let (output, text) = self.output("a", &words);
            assert!(output.status.success(), "{text}");
            made = words.last().cloned();
        }
        let made = made.expect("the recipe makes credentials");
        let [from, to] = ["a", "b"].map(|m| self.dir.path().join(m).join(&made));
        assert!(
            Command::new("cp")
                .arg("-rp")
                .args([from, to])
                .status()
                .unwrap()
                .success()
        );
    }

    /// The lighthouse, on a free port; and the URL under which the others reach it.
    fn lighthouse(&self, words: Vec<String>) -> (Process, String) {
        let mut lighthouse = self.start("a", &with(words, "--bind 0.0.0.0:0"));
        let url = lighthouse.says("oxccl: lighthouse at https://");
        let (_, port) = url.rsplit_once(':').unwrap();
        (lighthouse, format!("https://127.0.0.1:{port}"))
    }

    /// Asks until the answer has `text`.
    fn until_why(&self, words: &[String], text: &str) {
        let end = Instant::now() + LONG;
        loop {
            let (output, said) = self.output("a", words);
            // 3: no lighthouse answered.
            assert!(matches!(output.status.code(), Some(0 | 1)), "{said}");
            if said.contains(text) {
                return;
            }
            assert!(Instant::now() < end, "no '{text}': {said}");
            std::thread::park_timeout(Duration::from_millis(20));
        }
    }
}

/// The command with the URL of its lighthouse replaced.
fn at(words: &[String], url: &str) -> Vec<String> {
    let is_url = |word: &String| word.starts_with("http") && word.ends_with(":29510");
    assert_eq!(words.iter().filter(|w| is_url(w)).count(), 1, "{words:?}");
    let replaced = words
        .iter()
        .map(|w| if is_url(w) { url.to_owned() } else { w.clone() });
    replaced.collect()
}

fn readme() {
    let recipe = section("README.md", "Across machines");
    let machines = Machines::new();
    machines.credentials(&recipe);
    let (lighthouse, url) = machines.lighthouse(one(&recipe, "oxccl lighthouse"));
    let why = at(&one(&recipe, "oxccl why"), &url);
    machines.until_why(&why, "no replica has asked");

    let launches = all(&recipe, "oxccl launch");
    assert_eq!(launches.len(), 2, "{launches:?}");
    let launch = |machine: &str, words: &[String]| {
        machines.start(machine, &with(at(words, &url), &format!("--rounds 4 {SMALL}")))
    };
    let first = launch("a", &launches[0]);
    machines.until_why(&why, "1 replica waits for a quorum");
    let hashes = [first, launch("b", &launches[1])].map(|mut launcher| {
        let status = launcher.ends();
        let said = launcher.said();
        assert_eq!(status.code(), Some(0), "{said}");
        let (_, hash) = said
            .split_once(": parameters ")
            .unwrap_or_else(|| panic!("no hash: {said}"));
        hash.split_whitespace().next().unwrap().to_owned()
    });
    assert!(hashes[0].len() >= 16 && hashes[0] == hashes[1], "{hashes:?}");
    assert_eq!(lighthouse.ended().code(), Some(0));
}

fn orders() {
    let recipe = section("docs/credentials.md", "Two machines, from nothing");
    let machines = Machines::new();
    machines.credentials(&recipe);
    let (_lighthouse, url) = machines.lighthouse(one(&recipe, "oxccl lighthouse"));
    let launches = all(&recipe, "oxccl launch");
    assert_eq!(launches.len(), 2, "{launches:?}");
    let endless = format!("--rounds 100000000 --eager --delay 0 --mixing 0 {SMALL}");
    let mut first = machines.start("a", &with(at(&launches[0], &url), &endless));
    let mut second = machines.start("b", &with(at(&launches[1], &url), &endless));
    let readme = section("README.md", "Across machines");
    let why = at(&one(&readme, "oxccl why"), &url);
    machines.until_why(&why, "by 2 replicas");

    // An order goes to a replica whose stream is there, which a moment after its start it is not yet.
    let order = |words: Vec<String>| {
        let end = Instant::now() + LONG;
        loop {
            let mut command = machines.command("a", &words);
            let output = command.env("OXCCL_CREDENTIALS", "job1").output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            if output.status.success() {
                return;
            }
            assert!(Instant::now() < end, "{words:?}: {said}");
            std::thread::park_timeout(Duration::from_millis(20));
        }
    };
    let back = section("docs/credentials.md", "Take a certificate back");
    order(at(&one(&back, "oxccl replica evict"), &url));
    first.says("replica 0 started (incarnation 1");
    machines.until_why(&why, "by 2 replicas");
    let asked = section("docs/tolerance.md", "What an operator may ask for");
    order(at(&one(&asked, "oxccl replica drain"), &url));
    assert_eq!(second.ends().code(), Some(0), "{}", second.said());
    assert_eq!(first.ended().code(), Some(130));
}
