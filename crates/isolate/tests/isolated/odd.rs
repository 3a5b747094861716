//! A backend that misbehaves on order, registered in this program and therefore in its children: hint `do` says how.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use ftcore::registry::{BackendFactory, StaticBackend};
use ftcore::{
    Capabilities, Checked, Completer, Completion, Configuration, DType, DTypeSet, Device, Epoch, Error,
    ErrorKind, FeatureSet, GroupInfo, GroupOptions, OpKind, OpSet, ProcessGroup, ReduceOp, Rejected, Result,
    SubmitOptions, Tensor, Traffic, Work, deadline_in, names, work_pair,
};

struct Odd {
    options: GroupOptions,
    capabilities: Capabilities,
    state: Mutex<State>,
}

/// The configuration, and what is pending for ever.
type State = (Option<Configuration>, Vec<(Completer, Vec<Tensor>)>);

fn capabilities() -> Capabilities {
    Capabilities {
        ops: OpSet::of(&OpKind::ALL),
        moves: DTypeSet::of(&DType::ALL),
        reduces: [DTypeSet::of(&DType::ALL); ReduceOp::COUNT],
        features: FeatureSet::NONE.with(ftcore::Feature::Split),
        options: names(&["net_name", "min_ctas", "hint:do", "hint:other"]),
        devices: names(&["cpu", "xpu"]),
        notes: Vec::new(),
    }
}

fn lost() -> Error {
    Error::new(ErrorKind::PeerLost, "closed the connection").with_peer(0)
}

impl Odd {
    fn orders(&self) -> &str {
        self.options.hints.get("do").map_or("", String::as_str)
    }
}

impl ProcessGroup for Odd {
    fn info(&self) -> GroupInfo {
        let state = self.state.lock().unwrap();
        let c = state.0.as_ref();
        GroupInfo {
            backend: "odd".into(),
            // What a test wants to know of the other process.
            name: format!("{:?}", self.options).into(),
            rank: c.map_or(0, |c| c.rank),
            world_size: c.map_or(0, |c| c.world_size),
            epoch: c.map_or(Epoch(0), |c| c.epoch),
            device: Device::CPU,
            dropped_options: Vec::new(),
        }
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn configure(&self, configuration: Configuration) -> Result<()> {
        match self.orders() {
            "hang configure" => loop {
                std::thread::park();
            },
            "fail configure" => return Err(Error::new(ErrorKind::Backend, "no route").with_code(42)),
            "use the store" => {
                let key = format!("{}/hello", configuration.prefix);
                configuration
                    .store
                    .set(&key, b"from the child", configuration.deadline)?;
                configuration.store.get("answer", configuration.deadline)?;
            }
            _ => {}
        }
        self.state.lock().unwrap().0 = Some(configuration);
        Ok(())
    }

    fn submit(&self, op: Checked, options: SubmitOptions) -> Result<Work, Box<Rejected>> {
        let op = op.into_inner();
        let deadline = options
            .deadline
            .unwrap_or_else(|| deadline_in(self.options.timeout));
        let (work, completer) = work_pair(op.kind(), deadline, |_| {});
        let mut tensors = op.into_tensors();
        match self.orders() {
            "crash" => {
                eprintln!("the library's last line");
                std::process::abort();
            }
            "exit" => std::process::exit(7),
            "left_files" => {
                // As oneCCL names its shared memory.
                let file = format!("/dev/shm/{}:0:0", std::process::id());
                std::fs::write(file, "left behind").unwrap();
                self.state.lock().unwrap().1.push((completer, tensors));
            }
            "hang" | "lose idle" => self.state.lock().unwrap().1.push((completer, tensors)),
            // Once the test says so, as a library does that has seen the end of rank 0's child.
            "lose" | "lose and exit" => {
                let exits = self.orders() == "lose and exit";
                let store = self.state.lock().unwrap().0.as_ref().unwrap().store.clone();
                std::thread::spawn(move || {
                    store.wait(&["lose"], deadline).unwrap();
                    completer.fail(lost(), tensors);
                    if exits {
                        // Not before its parent has heard that.
                        store.wait(&["heard"], deadline).unwrap();
                        std::process::exit(7);
                    }
                });
            }
            // Its own time-out, with nothing else pending, or once another operation is.
            "late" | "late beside another" => {
                let mut state = self.state.lock().unwrap();
                state.1.push((completer, tensors));
                if self.orders() == "late" || state.1.len() > 1 {
                    let (first, tensors) = state.1.remove(0);
                    drop(state);
                    first.fail(Error::timeout("the library gave up"), tensors);
                }
            }
            "block" => loop {
                std::thread::park();
            },
            "keep" => {
                // A library that may still write there.
                let error = Error::new(ErrorKind::Backend, "internal error").with_code(11);
                tensors.into_iter().for_each(std::mem::forget);
                completer.fail(error, Vec::new());
            }
            orders => {
                if orders == "vandal" {
                    tensors.iter_mut().for_each(|t| t.bytes_mut().fill(0xEE));
                }
                if orders == "noise" {
                    for i in 0..2000 {
                        println!("noise {i} on stdout \u{1}\u{2}\0\0\0\0");
                        eprintln!("noise {i} on stderr");
                    }
                }
                completer.succeed(Completion {
                    tensors,
                    source: None,
                    contributors: 0,
                });
            }
        }
        Ok(work)
    }

    fn split(&self, _: Option<u32>, _: u32, _: Instant) -> Result<Option<Box<dyn ProcessGroup>>> {
        let part = Odd::new(self.options.clone());
        part.state
            .lock()
            .unwrap()
            .0
            .clone_from(&self.state.lock().unwrap().0);
        Ok(Some(Box::new(part)))
    }

    fn abort(&self, _: &str) {}

    fn error(&self) -> Option<Error> {
        let state = self.state.lock().unwrap();
        let configuration = state.0.as_ref().filter(|_| self.orders() == "lose idle")?;
        let told = configuration
            .store
            .check(&["lose"], deadline_in(self.options.timeout));
        told.is_ok_and(|told| told).then(lost)
    }

    fn shutdown(&self, _: Instant) -> Result<()> {
        Ok(())
    }

    fn traffic(&self) -> Traffic {
        Traffic::default()
    }
}

impl Odd {
    fn new(options: GroupOptions) -> Self {
        Self {
            options,
            capabilities: capabilities(),
            state: Mutex::new((None, Vec::new())),
        }
    }
}

struct OddFactory;

impl BackendFactory for OddFactory {
    fn probe(&self) -> Result<()> {
        Ok(())
    }

    fn capabilities(&self) -> Capabilities {
        capabilities()
    }

    fn create(&self, _: &Device, options: &GroupOptions) -> Result<Box<dyn ProcessGroup>> {
        let c = capabilities();
        let honoured: Vec<&str> = c.options.iter().map(|o| &**o).collect();
        options.require_honoured("odd", &honoured)?;
        match options.hints.get("do").map(String::as_str) {
            Some("crash at start") => std::process::abort(),
            Some("hang at start") => loop {
                std::thread::park();
            },
            _ => Ok(Box::new(Odd::new(options.clone()))),
        }
    }
}

ftcore::inventory::submit! {
    StaticBackend {
        name: "odd",
        device: "cpu",
        origin: "tests",
        version: "1",
        factory: || Arc::new(OddFactory),
    }
}
