//! The README's recipe for two machines, played on one: its commands word for word, but for the host, the port and the length of the run. The `oxccl` of
//! these commands is this test's program under that name.

use std::ffi::OsStr;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};

use libtest_mimic::{Arguments, Failed, Trial};

#[path = "../../xtask/src/tidy/commands/shell.rs"]
#[allow(
    dead_code,
    unused_imports,
    reason = "this test reads a part of what the file has"
)]
mod shell;

use shell::documented;

/// A run of a moment.
const SHORT: &str = "--rounds 6 --sync-every 4 --d-model 32 --layers 2 --seq 32 --batch 2";

fn main() -> ExitCode {
    let name = std::env::args_os().next().map(PathBuf::from);
    if name.as_deref().and_then(Path::file_name) == Some(OsStr::new("oxccl")) {
        oxccl::backend::init();
        return ExitCode::from(oxccl_cli::run(std::env::args_os(), Vec::new()));
    }
    let arguments = Arguments::from_args();
    let tests = vec![Trial::test(
        "the_readmes_two_machines_end_with_the_same_parameters",
        two_machines,
    )];
    libtest_mimic::run(&arguments, tests).exit_code()
}

/// Ended with the test.
struct Ends(Child);

impl Drop for Ends {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A machine: a folder of its own, and the programs on its path.
struct Machine {
    folder: PathBuf,
    path: String,
}

impl Machine {
    fn new(at: &Path, name: &str) -> Result<Self, Failed> {
        let folder = at.join(name);
        std::fs::create_dir_all(folder.join("bin"))?;
        let programs = [
            ("oxccl", std::env::current_exe()?),
            ("train_diloco", env!("CARGO_BIN_EXE_train_diloco").into()),
        ];
        for (name, program) in programs {
            std::os::unix::fs::symlink(program, folder.join("bin").join(name))?;
        }
        let path = std::env::var("PATH")?;
        Ok(Self {
            path: format!("{}:{path}", folder.join("bin").display()),
            folder,
        })
    }

    fn command(&self, words: &[String]) -> Command {
        let program = words.first().map(String::as_str).unwrap_or_default();
        let mut command = Command::new(self.folder.join("bin").join(program));
        command
            .args(words.iter().skip(1))
            .current_dir(&self.folder)
            .env("PATH", &self.path)
            .env("RAYON_NUM_THREADS", "1")
            .env_remove("OXCCL_CREDENTIALS")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    fn run(&self, words: &[String]) -> Result<(bool, String), Failed> {
        let output = self.command(words).output()?;
        let said = [output.stdout, output.stderr].map(|s| String::from_utf8_lossy(&s).into_owned());
        Ok((output.status.success(), said.concat()))
    }
}

/// The command of the section that begins with `begins`, whole or in the prose.
fn find(section: &str, begins: &str) -> Result<Vec<Vec<String>>, Failed> {
    let found: Vec<Vec<String>> = documented(section)
        .into_iter()
        .map(|command| command.words)
        .filter(|words| words.join(" ").starts_with(begins))
        .collect();
    if found.is_empty() {
        return Err(format!("the README's section has no command '{begins} …'").into());
    }
    Ok(found)
}

fn words(words: &[String], more: &str) -> Vec<String> {
    let more = more.split_whitespace().map(str::to_owned);
    words.iter().cloned().chain(more).collect()
}

fn two_machines() -> Result<(), Failed> {
    let readme = Path::new(env!("CARGO_MANIFEST_DIR")).join("../README.md");
    let text = std::fs::read_to_string(readme)?;
    let (_, section) = text
        .split_once("\n## Across machines\n")
        .ok_or("the README has no section 'Across machines'")?;
    let (section, _) = section.split_once("\n## ").unwrap_or((section, ""));
    let one = |begins: &str| find(section, begins).map(|mut found| found.swap_remove(0));

    let at = tempfile::tempdir()?;
    let (a, b) = (Machine::new(at.path(), "a")?, Machine::new(at.path(), "b")?);
    let (made, said) = a.run(&one("oxccl credentials new")?)?;
    if !made {
        return Err(said.into());
    }
    // "A copy of the folder."
    let copied = Command::new("cp")
        .arg("-r")
        .args([a.folder.join("job1"), b.folder.join("job1")])
        .status()?;
    assert!(copied.success());

    let lighthouse = words(
        &one("oxccl lighthouse")?,
        "--bind 127.0.0.1:0 --state-file record.json",
    );
    let mut lighthouse = Ends(a.command(&lighthouse).spawn()?);
    let errors = lighthouse.0.stderr.take().ok_or("a pipe")?;
    let mut lines = BufReader::new(errors).lines();
    let url = loop {
        let line = lines.next().ok_or("the lighthouse ended")??;
        if let Some(rest) = line.strip_prefix("oxccl: lighthouse at ") {
            break rest.split(' ').next().unwrap_or_default().to_owned();
        }
    };
    let here = |words: Vec<String>| -> Vec<String> {
        let replaced = words.iter().map(|w| w.replace("https://HOST:29510", &url));
        replaced.collect()
    };

    let launches = find(section, "oxccl launch --credentials")?;
    assert_eq!(launches.len(), 2, "one for each machine: {launches:?}");
    let mut launchers = Vec::new();
    for (machine, launch) in [&a, &b].into_iter().zip(launches) {
        launchers.push(machine.command(&words(&here(launch), SHORT)).spawn()?);
    }
    // Whatever it finds, it answers: 0 or 1.
    let why = a.command(&here(one("oxccl why")?)).output()?;
    let said = String::from_utf8_lossy(&why.stdout).into_owned();
    assert!(
        matches!(why.status.code(), Some(0 | 1)) && !said.is_empty(),
        "{said}{}",
        String::from_utf8_lossy(&why.stderr)
    );

    let mut hashes = Vec::new();
    for launcher in launchers {
        let output = launcher.wait_with_output()?;
        let said = [output.stdout, output.stderr].map(|s| String::from_utf8_lossy(&s).into_owned());
        let said = said.concat();
        assert!(output.status.success(), "{said}");
        let hash = said
            .lines()
            .filter_map(|line| line.split_once("parameters "))
            .filter_map(|(_, rest)| rest.split_whitespace().next())
            .next_back()
            .ok_or_else(|| format!("no hash in:\n{said}"))?
            .to_owned();
        hashes.push(hash);
    }
    assert!(hashes[0].len() >= 16 && hashes[0] == hashes[1], "{hashes:?}");
    Ok(())
}
