//! Slurm: srun over four nodes of a cluster of its own, all on this machine.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use libtest_mimic::{Failed, Trial};
use tempfile::TempDir;

use crate::{LIMIT, Outcome, SCENE, all_reduced, finish, program, said};

/// A test's name and what it does.
type Case = (&'static str, fn(&Cluster) -> Outcome);

pub(crate) fn trials() -> Vec<Trial> {
    let cases: [Case; 5] = [
        ("ranks_of_four_nodes_meet_on_the_first", four_nodes),
        ("a_step_of_other_nodes_meets_on_its_own_first", later_nodes),
        ("a_killed_task_is_named_by_the_others", killed_task),
        ("a_requeued_job_meets_again", requeued),
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
            cluster.as_ref().map_or(Ok(()), run)
        });
        trial.with_ignored_flag(!is_there)
    });
    all.into()
}

/// The daemons, and their folder. Their ports are fixed: two clusters at a time do not fit on one machine.
struct Cluster {
    folder: TempDir,
    daemons: Vec<std::process::Child>,
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for daemon in &mut self.daemons {
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
        let config = format!(
            "ClusterName=test\nSlurmctldHost={host}(127.0.0.1)\nSlurmUser=root\nAuthType=auth/munge\n\
             AuthInfo=socket={at}/munge/socket\nProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nMpiDefault=none\n\
             SlurmdSpoolDir={at}/spool-%n\nStateSaveLocation={at}/state\nSlurmctldPidFile={at}/ctld.pid\n\
             SlurmdPidFile={at}/%n.pid\nSlurmctldLogFile={at}/ctld.log\nSlurmdLogFile={at}/%n.log\nSlurmctldPort=16817\n\
             ReturnToService=2\nSlurmdParameters=config_overrides\nSchedulerParameters=batch_sched_delay=1\n\
             NodeName=n[1-4] NodeHostname={host} NodeAddr=127.0.0.1 Port=[17001-17004] CPUs=4\n\
             PartitionName=all Nodes=n[1-4] Default=YES MaxTime=INFINITE State=UP\n"
        );
        let path = folder.path();
        fs::write(path.join("slurm.conf"), config)?;
        // The nodes' names, as a cluster's name service would have them: seen by what the nodes start and by nobody else.
        let names: String = (1..=4).map(|n| format!("127.0.0.1 n{n}\n")).collect();
        fs::write(path.join("hosts"), format!("127.0.0.1 localhost {host}\n{names}"))?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
        let mut cluster = Self {
            folder,
            daemons: Vec::new(),
        };
        cluster.start_munge()?;
        fs::create_dir(cluster.path("state"))?;
        cluster.spawn(Command::new("slurmctld").args(["-D", "-c"]))?;
        let hosts = cluster.path("hosts").display().to_string();
        for n in 1..=4 {
            let enter = format!("mount --bind {hosts} /etc/hosts && exec slurmd -D -N n{n}");
            cluster.spawn(Command::new("unshare").args(["--mount", "sh", "-c", &enter]))?;
        }
        cluster.wait("four idle nodes", |cluster| {
            let info = finish(cluster.command("sinfo").args(["--noheader", "--format=%D %t"]))?;
            Ok(said(&info).trim() == "4 idle")
        })?;
        Ok(cluster)
    }

    /// munged takes a key and a folder of its own user's only.
    fn start_munge(&mut self) -> Outcome {
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

    fn spawn(&mut self, command: &mut Command) -> Outcome {
        command
            .env("SLURM_CONF", self.path("slurm.conf"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        self.daemons.push(command.spawn()?);
        Ok(())
    }

    fn wait(&self, what: &str, mut is_so: impl FnMut(&Self) -> Result<bool, Failed>) -> Outcome {
        let begun = Instant::now();
        while !is_so(self)? {
            if begun.elapsed() > LIMIT {
                let log = fs::read_to_string(self.path("ctld.log")).unwrap_or_default();
                return Err(format!("no {what} after {LIMIT:?}; slurmctld says:\n{log}").into());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// Runs this file as the ranks of a step. What they say goes to files: when the step ends before srun has read the ranks' last lines, the
    /// controller ends srun, and srun loses them.
    fn srun(&self, scene: &str, options: &[&str]) -> Result<Output, Failed> {
        let said = tempfile::tempdir_in(self.folder.path())?;
        let mut srun = self.command("srun");
        srun.env(SCENE, scene)
            .args(options)
            .arg("-o")
            .arg(said.path().join("%t"))
            .arg(program());
        let mut output = finish(&mut srun)?;
        for file in fs::read_dir(said.path())? {
            output.stdout.extend(fs::read(file?.path())?);
        }
        Ok(output)
    }
}

fn four_nodes(cluster: &Cluster) -> Outcome {
    // As from a login node with another address: where srun runs is no rank's affair.
    all_reduced(&cluster.srun("reduce", &["-N4", "-n8"])?, 8)
}

fn later_nodes(cluster: &Cluster) -> Outcome {
    all_reduced(&cluster.srun("reduce", &["-N2", "-n2", "-w", "n[3-4]"])?, 2)
}

fn killed_task(cluster: &Cluster) -> Outcome {
    let text = said(&cluster.srun("die", &["-N4", "-n4", "-K0"])?);
    for rank in [0, 2, 3] {
        let line = format!("rank {rank} heard PeerLost of rank 1");
        if !text.contains(&line) {
            return Err(format!("'{line}' was not said:\n{text}").into());
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
    // The first time it waits behind its ranks until it is requeued. Each attempt's ranks say what they say to files of their own (see `srun`).
    let body = format!(
        "srun -o \"requeued.${{SLURM_RESTART_COUNT:-0}}.%t\" {} || true\n[ -n \"$SLURM_RESTART_COUNT\" ] || sleep 600",
        program()
    );
    let out = cluster.path("requeued.out");
    let job = submit(
        cluster,
        "reduce",
        &script(cluster, &body)?,
        &out.display().to_string(),
    )?;
    let summed = |attempt: u32| {
        (0..2).all(|rank| {
            let file = cluster.path(&format!("requeued.{attempt}.{rank}"));
            fs::read_to_string(file).is_ok_and(|said| said.contains(" of 2 has 3"))
        })
    };
    cluster.wait("sums of the first attempt", |_| Ok(summed(0)))?;
    finish(cluster.command("scontrol").args(["requeue", &job]))?;
    // A requeued job waits two minutes by itself.
    let id = format!("jobid={job}");
    let ended = || fs::read_to_string(&out).is_ok_and(|said| said.contains("through"));
    let mut asked = Instant::now();
    cluster.wait("end of the second attempt", |cluster| {
        if asked.elapsed() > Duration::from_millis(500) {
            asked = Instant::now();
            finish(cluster.command("scontrol").args(["update", &id, "StartTime=now"]))?;
        }
        Ok(ended())
    })?;
    if summed(1) {
        return Ok(());
    }
    let ranks = [0, 1].map(|rank| fs::read_to_string(cluster.path(&format!("requeued.1.{rank}"))));
    Err(format!(
        "the second attempt ended without its sums; the script said:\n{}\nits ranks: {ranks:?}",
        fs::read_to_string(&out)?
    )
    .into())
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
