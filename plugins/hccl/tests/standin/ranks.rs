//! Scenarios and their ranks: processes of this program with a store of the parent between them.

use std::io::Read;
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use oxccl_hccl::ftcore::{
    Accelerator, Collective, Configuration, DType, Device, DeviceKind, Element, Epoch, Error, GroupOptions,
    ProcessGroup, ProcessGroupExt, ReduceOp, Store, SubmitOptions, TcpStore, TcpStoreServer, Tensor, Work,
    deadline_in,
};
use oxccl_hccl::{HcclGroup, HpuAccelerator};

const SCENARIO: &str = "OXCCL_TEST_SCENARIO";
const RANK: &str = "OXCCL_TEST_RANK";
const STORE: &str = "OXCCL_TEST_STORE";
/// Ranks that are still there by then are killed and the scenario has failed.
const TIME_LIMIT: Duration = Duration::from_secs(60);

/// Why a scenario failed.
pub(crate) type Outcome<T = ()> = Result<T, String>;

/// Fails with a text unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($text:tt)+) => {
        if !$condition {
            return Err(format!($($text)+));
        }
    };
}
pub(crate) use ensure;

/// Something that several ranks do together.
#[derive(Clone)]
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    pub(crate) world: u32,
    pub(crate) body: fn(&Rank) -> Outcome,
    /// (rank, variable of the stand-in, value): faults of single ranks.
    pub(crate) faults: &'static [(u32, &'static str, &'static str)],
    /// The rank that ends by SIGKILL.
    pub(crate) killed: Option<u32>,
    /// Where the vendor libraries are, if not the stand-in's folder.
    pub(crate) libraries: fn() -> PathBuf,
}

/// A scenario without faults.
pub(crate) const fn scenario(name: &'static str, world: u32, body: fn(&Rank) -> Outcome) -> Scenario {
    Scenario {
        name,
        world,
        body,
        faults: &[],
        killed: None,
        libraries: crate::folder::standin,
    }
}

impl Scenario {
    pub(crate) const fn faults(mut self, faults: &'static [(u32, &'static str, &'static str)]) -> Self {
        self.faults = faults;
        self
    }

    pub(crate) const fn killing(mut self, rank: u32) -> Self {
        self.killed = Some(rank);
        self
    }

    pub(crate) const fn with_libraries(mut self, libraries: fn() -> PathBuf) -> Self {
        self.libraries = libraries;
        self
    }

    /// Runs all ranks; the failures of all of them in one text.
    pub(crate) fn judge(&self) -> Outcome {
        let text = |e: &dyn std::fmt::Display| e.to_string();
        let server = TcpStoreServer::bind("127.0.0.1:0").map_err(|e| text(&e))?;
        let program = std::env::current_exe().map_err(|e| text(&e))?;
        let mut ranks = Vec::new();
        for rank in 0..self.world {
            let mut command = Command::new(&program);
            command
                .env(SCENARIO, self.name)
                .env(RANK, rank.to_string())
                .env(STORE, format!("127.0.0.1:{}", server.port()))
                .env("OXCCL_HCCL_PATH", (self.libraries)())
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::piped());
            for (_, variable, value) in self.faults.iter().filter(|(r, ..)| *r == rank) {
                match *variable {
                    // The plugin's own variables and the vendor's are given in full.
                    "OXCCL_HCCL_MODULE_ID" | "HLS_MODULE_ID" => command.env(variable, value),
                    fault => command.env(format!("OXCCL_STANDIN_HCCL_{fault}"), value),
                };
            }
            ranks.push(Running(command.spawn().map_err(|e| text(&e))?));
        }
        let until = Instant::now() + TIME_LIMIT;
        let failures: Vec<String> = ranks
            .iter_mut()
            .zip(0..)
            .filter_map(|(running, rank)| {
                let failure = running.finish(until, self.killed == Some(rank)).err()?;
                Some(format!("rank {rank}: {failure}"))
            })
            .collect();
        if failures.is_empty() {
            Ok(())
        } else {
            Err(failures.join("\n"))
        }
    }
}

struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        if let Ok(None) = self.0.try_wait() {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}

impl Running {
    fn ended(&mut self, until: Instant) -> Outcome<ExitStatus> {
        loop {
            match self.0.try_wait() {
                Ok(Some(status)) => return Ok(status),
                Ok(None) if Instant::now() < until => std::thread::sleep(Duration::from_millis(2)),
                Ok(None) => return Err(format!("did not end within {} s", TIME_LIMIT.as_secs())),
                Err(e) => return Err(e.to_string()),
            }
        }
    }

    fn finish(&mut self, until: Instant, killed: bool) -> Outcome {
        use std::os::unix::process::ExitStatusExt;
        let status = self.ended(until)?;
        if killed {
            ensure!(
                status.signal() == Some(9),
                "should have been killed, ended with {status}"
            );
            return Ok(());
        }
        if status.success() {
            return Ok(());
        }
        let mut said = String::new();
        if let Some(mut stderr) = self.0.stderr.take() {
            let _ = stderr.read_to_string(&mut said);
        }
        Err(format!("{status}: {}", said.trim()))
    }
}

/// Runs this process's part of a scenario, if it was started for one.
pub(crate) fn run_as_rank(scenarios: &[Scenario]) -> Option<ExitCode> {
    let name = std::env::var(SCENARIO).ok()?;
    let run = || -> Outcome {
        let scenario = scenarios
            .iter()
            .find(|s| s.name == name)
            .ok_or_else(|| format!("there is no scenario '{name}'"))?;
        let variable = |name: &str| std::env::var(name).map_err(|e| format!("{name}: {e}"));
        let number = variable(RANK)?.parse().map_err(|e| format!("{RANK}: {e}"))?;
        let store = TcpStore::connect(&variable(STORE)?, deadline_in(Duration::from_secs(30)))
            .map_err(|e| e.to_string())?;
        let rank = Rank {
            rank: number,
            world: scenario.world,
            store: Arc::new(store),
        };
        (scenario.body)(&rank)?;
        // A rank that ends is a lost peer to those that are not through yet.
        if scenario.killed.is_none() {
            rank.meet("the end")?;
        }
        Ok(())
    };
    // A hanging call of the library keeps its thread: the process ends without asking it.
    match run() {
        Ok(()) => std::process::exit(0),
        Err(failure) => {
            eprintln!("{failure}");
            std::process::exit(1)
        }
    }
}

/// This process as a rank.
pub(crate) struct Rank {
    pub(crate) rank: u32,
    pub(crate) world: u32,
    pub(crate) store: Arc<dyn Store>,
}

/// A deadline in milliseconds.
pub(crate) fn within(milliseconds: u64) -> Instant {
    deadline_in(Duration::from_millis(milliseconds))
}

/// Shorthand for an error as text.
pub(crate) fn text(e: impl Into<Error>) -> String {
    e.into().to_string()
}

impl Rank {
    /// What should work, works by then.
    pub(crate) fn soon(&self) -> Instant {
        within(30_000)
    }

    pub(crate) fn unconfigured(&self) -> Outcome<HcclGroup> {
        HcclGroup::new("test", &Device::new(DeviceKind::Hpu, 0), &GroupOptions::default()).map_err(text)
    }

    pub(crate) fn group(&self) -> Outcome<HcclGroup> {
        let group = self.unconfigured()?;
        group.configure(self.configuration(1)).map_err(text)?;
        Ok(group)
    }

    pub(crate) fn configuration(&self, epoch: u64) -> Configuration {
        Configuration {
            store: self.store.clone(),
            prefix: "test".to_string(),
            name: "test".to_string(),
            epoch: Epoch(epoch),
            rank: self.rank,
            world_size: self.world,
            deadline: self.soon(),
            cancel: Default::default(),
        }
    }

    /// Waits until all ranks are here; through the store, not through HCCL.
    pub(crate) fn meet(&self, name: &str) -> Outcome {
        self.store
            .barrier(&format!("meet/{name}"), self.world, self.soon())
            .map_err(text)
    }

    /// A device tensor with that contents.
    pub(crate) fn tensor<T: Element>(&self, data: &[T]) -> Outcome<Tensor> {
        let host = Tensor::from_slice(data);
        let stream = HpuAccelerator.current_stream(0).map_err(text)?;
        let mut tensor = HpuAccelerator.alloc(0, T::DTYPE, &[data.len()]).map_err(text)?;
        HpuAccelerator
            .copy_in(host.bytes(), &mut tensor, &*stream)
            .map_err(text)?;
        Ok(tensor)
    }

    /// The contents of a device tensor.
    pub(crate) fn read<T: Element>(&self, tensor: &Tensor) -> Outcome<Vec<T>> {
        let mut host = Tensor::zeros(T::DTYPE, tensor.count());
        let stream = HpuAccelerator.current_stream(0).map_err(text)?;
        HpuAccelerator
            .copy_out(tensor, host.bytes_mut(), &*stream)
            .map_err(text)?;
        host.into_vec::<T>().map_err(|refused| text(refused.0))
    }

    /// A group of this rank alone.
    pub(crate) fn group_of_one(&self) -> Outcome<HcclGroup> {
        let group = self.unconfigured()?;
        group
            .configure(Configuration {
                rank: 0,
                world_size: 1,
                prefix: format!("alone/{}", self.rank),
                ..self.configuration(1)
            })
            .map_err(text)?;
        Ok(group)
    }

    /// A sum of ones over the whole group, checked.
    pub(crate) fn sum_of_ones(&self, group: &dyn ProcessGroup) -> Outcome {
        let work = group
            .all_reduce(self.tensor(&[1i32; 500])?, ReduceOp::Sum)
            .map_err(text)?;
        let sum = self.read::<i32>(&work.take_tensor().map_err(text)?)?;
        let world = group.info().world_size as i32;
        ensure!(sum == vec![world; 500], "a sum of ones is {:?}", sum.first());
        Ok(())
    }

    /// Submits an all-reduce that has until `by`.
    pub(crate) fn submit(&self, group: &dyn ProcessGroup, by: Instant) -> Outcome<Work> {
        let tensors = vec![self.tensor(&[1.5f32; 3000])?];
        let op = Collective::AllReduce {
            tensors,
            op: ReduceOp::Sum,
        };
        group.run(op, SubmitOptions::by(by)).map_err(text)
    }

    /// The error of work that must fail.
    pub(crate) fn failure(&self, work: &Work) -> Outcome<Error> {
        match work.wait(self.soon()) {
            Err(e) => Ok(e),
            Ok(()) => Err(format!("{} succeeded that could not", work.kind())),
        }
    }

    /// What an operation that must fail fails with; what the group did, if the other rank failed before it was submitted.
    pub(crate) fn fails(&self, group: &dyn ProcessGroup) -> Outcome<Error> {
        match self.submit(group, self.soon()) {
            Ok(work) => self.failure(&work),
            Err(refused) => group.error().ok_or(refused),
        }
    }

    /// Ends this process as a crash would.
    pub(crate) fn die(&self) -> Outcome {
        let done = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
        Err(format!("still alive after SIGKILL: {done:?}"))
    }

    /// An empty tensor of the device, for calls that are refused.
    pub(crate) fn any(&self, dtype: DType) -> Outcome<Tensor> {
        HpuAccelerator.alloc(0, dtype, &[4]).map_err(text)
    }
}
