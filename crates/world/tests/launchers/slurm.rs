//! Slurm: srun over four nodes of a cluster of its own, all on this machine.
//!
//! What srun prints and how it ends say little: when the step ends before srun has read all, the controller ends srun. So ranks write to files, each
//! with the status of its end as the last line, and that is what the cases wait for.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use libtest_mimic::{Failed, Trial};
use tempfile::TempDir;

use crate::{LIMIT, Outcome, SCENE, documented, finish, free_ports, program, rank, said};

/// A test's name and what it does.
type Case = (&'static str, fn(&Cluster) -> Outcome);

pub(crate) fn trials() -> Vec<Trial> {
    let cases: [Case; 8] = [
        ("ranks_of_four_nodes_meet_on_the_first", four_nodes),
        ("a_step_of_other_nodes_meets_on_its_own_first", later_nodes),
        ("a_killed_task_is_named_by_the_others", killed_task),
        ("a_lost_node_takes_its_own_ranks_only", lost_node),
        ("a_requeued_job_meets_again", requeued),
        ("the_batch_script_for_a_world_starts_it", world_script),
        ("the_batch_script_for_replicas_starts_them_again", replicas_script),
        ("a_batch_script_without_srun_is_told_what_to_do", without_srun),
    ];
    // One cluster for all of them, and one case at a time: they count its nodes.
    let cluster: Arc<Mutex<Option<Cluster>>> = Arc::default();
    let is_there = std::env::var("OXCCL_TEST_SLURM").is_ok_and(|said| said == "1");
    let all = cases.map(|(case, run)| {
        let cluster = cluster.clone();
        let trial = Trial::test(format!("slurm::{case}"), move || {
            let mut cluster = cluster.lock().unwrap_or_else(PoisonError::into_inner);
            if cluster.is_none() {
                *cluster = Some(Cluster::start()?);
            }
            let Some(cluster) = cluster.as_ref() else {
                return Ok(());
            };
            run(cluster)
                .and_then(|()| cluster.wait_until_idle())
                .map_err(|e| cluster.with_evidence(&e))
        });
        trial.with_ignored_flag(!is_there)
    });
    all.into()
}

/// A rank's command: the program, and then the status of its end.
const RANK: &str = r#""$0"; code=$?; echo "ended with $code"; exit $code"#;

/// The daemons, and their folder. Two clusters at a time do not fit on one machine, whatever their ports: steps of both fail.
struct Cluster {
    folder: TempDir,
    daemons: Mutex<Vec<Child>>,
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for daemon in self.daemons().iter_mut() {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }
}

impl Cluster {
    fn start() -> Result<Self, Failed> {
        let folder = tempfile::tempdir()?;
        let at = folder.path().display().to_string();
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let host = host.split('.').next().unwrap_or(&host);
        let first = free_ports(5)?;
        let (from, to) = (first + 1, first + 4);
        let config = format!(
            "ClusterName=test\nSlurmctldHost={host}(127.0.0.1)\nSlurmUser=root\nAuthType=auth/munge\n\
             AuthInfo=socket={at}/munge/socket\nProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nMpiDefault=none\n\
             SlurmdSpoolDir={at}/spool-%n\nStateSaveLocation={at}/state\nSlurmctldPidFile={at}/ctld.pid\n\
             SlurmdPidFile={at}/%n.pid\nSlurmctldLogFile={at}/ctld.log\nSlurmdLogFile={at}/%n.log\nSlurmctldPort={first}\n\
             ReturnToService=2\nSlurmdParameters=config_overrides\nSchedulerParameters=batch_sched_delay=1\n\
             NodeName=n[1-4] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{from}-{to}] CPUs=4\n\
             PartitionName=all Nodes=n[1-4] Default=YES MaxTime=INFINITE State=UP\n"
        );
        let path = folder.path();
        fs::write(path.join("slurm.conf"), config)?;
        // The nodes' names, as a cluster's name service would have them: seen by what the nodes start and by nothing else.
        let names: String = (1..=4).map(|n| format!("127.0.0.1 n{n}\n")).collect();
        fs::write(path.join("hosts"), format!("127.0.0.1 localhost {host}\n{names}"))?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
        let cluster = Self {
            folder,
            daemons: Mutex::default(),
        };
        cluster.start_munge()?;
        fs::create_dir(cluster.path("state"))?;
        cluster.spawn(Command::new("slurmctld").args(["-D", "-c"]))?;
        for n in 1..=4 {
            cluster.start_node(n)?;
        }
        let idle = cluster.wait_for_nodes("4 idle");
        idle.map_err(|e| cluster.with_evidence(&e))?;
        Ok(cluster)
    }

    /// A node is its daemon, in a file system of its own.
    fn start_node(&self, n: u32) -> Outcome {
        let hosts = self.path("hosts").display().to_string();
        let enter = format!("mount --bind {hosts} /etc/hosts && exec slurmd -D -N n{n}");
        self.spawn(Command::new("unshare").args(["--mount", "sh", "-c", &enter]))
    }

    fn daemons(&self) -> MutexGuard<'_, Vec<Child>> {
        self.daemons.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the nodes are in these states, as `sinfo` counts them.
    fn wait_for_nodes(&self, states: &str) -> Outcome {
        self.wait(states, |cluster| {
            let info = finish(cluster.command("sinfo").args(["--noheader", "--format=%D %t"]))?;
            let said = said(&info);
            let mut lines: Vec<&str> = said.lines().map(str::trim).collect();
            lines.sort_unstable();
            Ok(lines.join(", ") == states)
        })
    }

    /// Waits until no job is left. Ranks that have ended leave an srun that still hears from the controller; without one it would wait for minutes.
    fn wait_until_idle(&self) -> Outcome {
        self.wait("end of the jobs", |cluster| {
            let queue = finish(cluster.command("squeue").arg("--noheader"))?;
            Ok(queue.status.success() && said(&queue).trim().is_empty())
        })
    }

    /// What explains a failure: the daemons' logs, each line once whatever its time, and the queue.
    fn with_evidence(&self, failed: &Failed) -> Failed {
        let mut text = failed.message().unwrap_or("failed").to_string();
        let logs = ["ctld", "n1", "n2", "n3", "n4"].map(|name| format!("{name}.log"));
        for log in logs {
            let lines = fs::read_to_string(self.path(&log)).unwrap_or_default();
            let mut seen = BTreeSet::new();
            let untimed = |line: &str| line.split_once("] ").map_or(line, |(_, rest)| rest).to_string();
            let new: Vec<&str> = lines.lines().filter(|line| seen.insert(untimed(line))).collect();
            text += &format!("\n---- {log} ----\n{}", new.join("\n"));
        }
        for (program, arguments) in [
            ("squeue", ["--all", "--long"]),
            ("sinfo", ["--all", "--long"]),
            ("scontrol", ["show", "jobs"]),
        ] {
            let said = finish(self.command(program).args(arguments))
                .map_or_else(|e| e.message().unwrap_or("?").to_string(), |o| said(&o));
            text += &format!("\n---- {program} ----\n{said}");
        }
        text.into()
    }

    /// munged takes a key and a folder of its own user's only.
    fn start_munge(&self) -> Outcome {
        let folder = self.path("munge");
        fs::create_dir(&folder)?;
        let key = folder.join("key");
        fs::write(&key, [7; 64])?;
        fs::set_permissions(&key, fs::Permissions::from_mode(0o400))?;
        let owned = Command::new("chown")
            .args(["-R", "munge"])
            .arg(&folder)
            .status()?;
        if !owned.success() {
            return Err("cannot give munge its folder".into());
        }
        let option = |name: &str, file: &str| format!("--{name}={}", folder.join(file).display());
        let socket = folder.join("socket");
        self.spawn(
            Command::new("setpriv")
                .args([
                    "--reuid=munge",
                    "--regid=munge",
                    "--clear-groups",
                    "munged",
                    "--foreground",
                ])
                .args([
                    option("key-file", "key"),
                    option("socket", "socket"),
                    option("pid-file", "pid"),
                ])
                .args([option("log-file", "log"), option("seed-file", "seed")]),
        )?;
        self.wait("munge's socket", |_| Ok(socket.exists()))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command
            .env("SLURM_CONF", self.path("slurm.conf"))
            .env_remove("MASTER_ADDR")
            .current_dir(self.folder.path());
        command
    }

    fn spawn(&self, command: &mut Command) -> Outcome {
        command
            .env("SLURM_CONF", self.path("slurm.conf"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let daemon = command.spawn()?;
        self.daemons().push(daemon);
        Ok(())
    }

    fn wait(&self, what: &str, mut is_so: impl FnMut(&Self) -> Result<bool, Failed>) -> Outcome {
        let begun = Instant::now();
        while !is_so(self)? {
            if begun.elapsed() > LIMIT {
                return Err(format!("no {what} after {LIMIT:?}").into());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// Runs this file as the ranks of a step, and gives what they said once all have ended.
    fn srun(&self, scene: &str, options: &[impl AsRef<OsStr>], ranks: u32) -> Result<Vec<String>, Failed> {
        let folder = tempfile::tempdir_in(self.folder.path())?;
        let mut srun = self.command("srun");
        srun.env(SCENE, scene)
            .args(options)
            .arg("-o")
            .arg(folder.path().join("%t"))
            .args(["sh", "-c", RANK])
            .arg(program());
        let ended = finish(&mut srun)?;
        let file = |rank| folder.path().join(format!("{rank}"));
        self.wait_for_ranks(ranks, file).map_err(|e| {
            format!(
                "{}\nsrun ended with {}: {}",
                e.message().unwrap_or("?"),
                ended.status,
                said(&ended)
            )
            .into()
        })
    }

    /// Waits until all ranks of a step have written how they ended.
    fn wait_for_ranks(&self, ranks: u32, file: impl Fn(u32) -> PathBuf) -> Result<Vec<String>, Failed> {
        let mut said = Vec::new();
        let waited = self.wait("end of each rank", |_| {
            let texts = (0..ranks).map(|rank| fs::read_to_string(file(rank)).unwrap_or_default());
            said = texts.collect();
            let has_ended = |text: &String| {
                let last = text.lines().last().unwrap_or_default();
                text.ends_with('\n') && last.starts_with("ended with ")
            };
            Ok(said.iter().all(has_ended))
        });
        waited.map_err(|e| format!("{}; the ranks: {said:#?}", e.message().unwrap_or("?")))?;
        Ok(said)
    }
}

/// Fails unless every rank has the sum, and ended well.
fn all_have_it(said: &[String]) -> Outcome {
    let world = said.len();
    let sum = world * (world + 1) / 2;
    for (rank, text) in said.iter().enumerate() {
        let line = format!("rank {rank} of {world} has {sum}");
        if text.matches(&line).count() != 1 || !text.ends_with("ended with 0\n") {
            return Err(format!("'{line}' was not said once, or rank {rank} ended badly: {said:#?}").into());
        }
    }
    Ok(())
}

fn four_nodes(cluster: &Cluster) -> Outcome {
    all_have_it(&cluster.srun("reduce", &documented("srun", "-n")?, 8)?)?;
    // As from a login node with another address: where srun runs is no rank's affair.
    all_have_it(&cluster.srun("reduce", &["-N4", "-n8"], 8)?)
}

fn later_nodes(cluster: &Cluster) -> Outcome {
    all_have_it(&cluster.srun("reduce", &["-N2", "-n2", "-w", "n[3-4]"], 2)?)
}

fn killed_task(cluster: &Cluster) -> Outcome {
    let said = cluster.srun("die", &["-N4", "-n4", "-K0"], 4)?;
    for (rank, text) in said.iter().enumerate() {
        let line = match rank {
            1 => "ended with 137".to_string(),
            _ => format!("rank {rank} heard PeerLost of rank 1"),
        };
        if !text.contains(&line) {
            return Err(format!("'{line}' was not said: {said:#?}").into());
        }
    }
    Ok(())
}

/// The machine of the last node goes: its daemon, what that started for the step, and the rank. The controller takes the node away as an operator or
/// its own time-out would.
fn lost_node(cluster: &Cluster) -> Outcome {
    let folder = tempfile::tempdir_in(cluster.folder.path())?;
    let (at, known) = (folder.path().to_path_buf(), folder.path().join("known"));
    let text = |rank: u32| fs::read_to_string(at.join(rank.to_string())).unwrap_or_default();
    let mut srun = cluster.command("srun");
    srun.env(SCENE, "lose-node")
        .env(rank::KNOWN, &known)
        .args(documented("srun", "--no-kill")?)
        .arg("-o")
        .arg(at.join("%t"))
        .args(["sh", "-c", RANK])
        .arg(program())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let mut srun = srun.spawn()?;
    let pid_of_the_last = || {
        text(3)
            .split_once("process ")?
            .1
            .lines()
            .next()?
            .parse::<u32>()
            .ok()
    };
    let outcome = (|| {
        cluster.wait("the last rank's process", |_| Ok(pid_of_the_last().is_some()))?;
        // The rank, its shell, and the daemon of the step.
        let parent = |pid: &u32| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
        };
        let rank = pid_of_the_last().ok_or("it is gone")?;
        let step: Vec<u32> = std::iter::successors(Some(rank), parent).take(3).collect();
        // That of the last node was started last.
        let daemon = cluster.daemons().last().ok_or("no daemons")?.id();
        for pid in [daemon].iter().chain(step.iter().rev()) {
            let pid = i32::try_from(*pid)
                .ok()
                .and_then(rustix::process::Pid::from_raw)
                .ok_or("a strange process")?;
            rustix::process::kill_process(pid, rustix::process::Signal::KILL)?;
        }
        let down = ["update", "NodeName=n4", "State=DOWN", "Reason=lost"];
        let taken = finish(cluster.command("scontrol").args(down))?;
        if !taken.status.success() {
            return Err(format!("scontrol: {}", said(&taken)).into());
        }
        cluster.wait_for_nodes("1 down, 3 alloc")?;
        fs::write(&known, "")?;
        cluster.wait_for_ranks(3, |rank| at.join(rank.to_string()))
    })();
    let _ = srun.kill();
    let _ = srun.wait();
    // For the cases that follow.
    cluster.start_node(4)?;
    cluster.wait_for_nodes("4 idle")?;
    for (rank, text) in outcome?.iter().enumerate() {
        for line in [
            &format!("rank {rank} heard PeerLost of rank 3"),
            "it outlived the node",
            "ended with 0",
        ] {
            if !text.contains(line) {
                return Err(format!("rank {rank} did not say '{line}': {text}").into());
            }
        }
    }
    Ok(())
}

/// A batch script that runs the ranks and says when it is through.
fn script(cluster: &Cluster, body: &str) -> Result<PathBuf, Failed> {
    let path = cluster.path("job.sh");
    fs::write(&path, format!("#!/bin/sh\n{body}\necho through\n"))?;
    Ok(path)
}

fn submit(cluster: &Cluster, scene: &str, script: &Path, out: &str) -> Result<String, Failed> {
    let mut sbatch = cluster.command("sbatch");
    sbatch
        .env(SCENE, scene)
        .args([
            "--parsable",
            "--requeue",
            "--open-mode=append",
            "-N2",
            "-n2",
            "-o",
            out,
        ])
        .arg(script);
    let output = finish(&mut sbatch)?;
    if !output.status.success() {
        return Err(said(&output).into());
    }
    Ok(said(&output).trim().to_string())
}

fn requeued(cluster: &Cluster) -> Outcome {
    // The first time it waits behind its ranks until it is requeued. Each attempt's ranks have files of their own.
    let body = format!(
        "srun -o \"requeued.${{SLURM_RESTART_COUNT:-0}}.%t\" sh -c '{RANK}' {} || true\n[ -n \"$SLURM_RESTART_COUNT\" ] || sleep 600",
        program()
    );
    let out = cluster.path("requeued.out");
    let job = submit(
        cluster,
        "reduce",
        &script(cluster, &body)?,
        &out.display().to_string(),
    )?;
    let ranks_of = |attempt: u32| {
        let file = move |rank| cluster.path(&format!("requeued.{attempt}.{rank}"));
        let ended = cluster.wait_for_ranks(2, file);
        let script = || fs::read_to_string(&out).unwrap_or_default();
        all_have_it(&ended.map_err(|e| {
            format!(
                "attempt {attempt}: {}\nthe script said: {}",
                e.message().unwrap_or("?"),
                script()
            )
        })?)
    };
    ranks_of(0)?;
    let requeued = finish(cluster.command("scontrol").args(["requeue", &job]))?;
    if !requeued.status.success() {
        return Err(format!("scontrol requeue: {}", said(&requeued)).into());
    }
    // By itself a requeued job waits two minutes, so that what its nodes know of the first attempt is forgotten. Its credentials have times in whole
    // seconds: one that is made in the second in which the first attempt's was revoked counts as revoked, too, and the job ends without a start.
    let id = format!("jobid={job}");
    let mut pending: Option<Instant> = None;
    cluster.wait("second attempt", |cluster| {
        if cluster.path("requeued.1.0").exists() {
            return Ok(true);
        }
        let state = finish(
            cluster
                .command("squeue")
                .args(["--noheader", "--format=%T", "--jobs", &job]),
        )?;
        match said(&state).trim() {
            // The nodes have revoked by now.
            "PENDING" if pending.get_or_insert_with(Instant::now).elapsed() > Duration::from_secs(2) => {
                finish(cluster.command("scontrol").args(["update", &id, "StartTime=now"]))?;
            }
            "PENDING" | "COMPLETING" | "CONFIGURING" | "RUNNING" => {}
            // It may have ended since the look at the file.
            _ if cluster.path("requeued.1.0").exists() => {}
            other => return Err(format!("the job ended before its second attempt: '{other}'").into()),
        }
        Ok(false)
    })?;
    ranks_of(1)
}

/// Submits a script of `deploy/slurm` as it is, with a command that runs each rank and writes to a file of its own, `file`. Gives what the script writes
/// to.
fn submit_ours(cluster: &Cluster, script: &str, file: &str, sbatch: &mut Command) -> Result<PathBuf, Failed> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/slurm");
    let out = cluster.path(script).with_extension("out");
    sbatch
        .arg("-o")
        .arg(&out)
        .arg(folder.join(script).canonicalize()?);
    let rank = format!("exec >>\"{file}\"; {RANK}");
    let submitted = finish(sbatch.args(["sh", "-c", &rank, &program()]))?;
    if !submitted.status.success() {
        return Err(said(&submitted).into());
    }
    Ok(out)
}

fn with_script(out: &Path, e: &Failed) -> Failed {
    let script = fs::read_to_string(out).unwrap_or_default();
    format!("{}\nthe script said: {script}", e.message().unwrap_or("?")).into()
}

fn world_script(cluster: &Cluster) -> Outcome {
    let mut sbatch = cluster.command("sbatch");
    sbatch
        .env(SCENE, "reduce")
        .args(["--nodes=2", "--ntasks-per-node=2"]);
    let out = submit_ours(cluster, "world.sbatch", "world.$SLURM_PROCID", &mut sbatch)?;
    let ended = cluster.wait_for_ranks(4, |rank| cluster.path(&format!("world.{rank}")));
    all_have_it(&ended.map_err(|e| with_script(&out, &e))?)
}

/// Two replicas of two ranks. In the first attempt of each its rank 1 dies; then `oxccl launch` starts it again.
fn replicas_script(cluster: &Cluster) -> Outcome {
    let oxccl = conformance::program("oxccl-cli", "oxccl")?;
    let folder = oxccl.parent().ok_or("a program without a folder")?;
    let path = format!("{}:{}", folder.display(), std::env::var("PATH")?);
    let mut sbatch = cluster.command("sbatch");
    sbatch
        .envs([("PATH", path.as_str()), ("RANKS", "2"), ("OXCCL_INSECURE", "1")])
        .env(SCENE, "die-once")
        .arg("--nodes=2");
    let file = "replica.$OXCCL_REPLICA.$OXCCL_INCARNATION.$RANK";
    let out = submit_ours(cluster, "replicas.sbatch", file, &mut sbatch)?;
    for replica in 0..2 {
        let file = |rank| cluster.path(&format!("replica.{replica}.1.{rank}"));
        let ended = cluster.wait_for_ranks(2, file);
        all_have_it(&ended.map_err(|e| with_script(&out, &e))?)?;
    }
    Ok(())
}

fn without_srun(cluster: &Cluster) -> Outcome {
    let out = cluster.path("batch.out");
    submit(
        cluster,
        "reduce",
        &script(cluster, &program())?,
        &out.display().to_string(),
    )?;
    let text = || fs::read_to_string(&out).unwrap_or_default();
    cluster.wait("end of the script", |_| Ok(text().contains("through")))?;
    if text().contains("begin the command with srun") {
        return Ok(());
    }
    Err(text().into())
}
