//! The thread `ox-isolate` that starts all children of this process, and the first words with a new child.
//!
//! Linux sends the death signal of `raw` when the thread that started a child ends, so children are started by one thread
//! that never ends before the process does.

use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{SendError, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ftcore::engine::spawn as start_thread;
use ftcore::{Cancel, Capabilities, Error, ErrorKind, Result, deadline_in, time_left};

use crate::crossing::Mode;
use crate::keeper::Keeper;
use crate::link::Link;
use crate::options::{ENV_CHILD, IsolateOptions};
use crate::pool::Pool;
use crate::store::serve::Stores;
use crate::wire::frames::{Carry, Greeting, Order};
use crate::{channel, raw};

struct Job {
    command: Command,
    deadline: Instant,
    /// Without room: what is sent was taken.
    answer: SyncSender<std::io::Result<Child>>,
}

impl Job {
    fn run(mut self) {
        if time_left(self.deadline).is_zero() {
            return;
        }
        if let Err(SendError(Ok(mut child))) = self.answer.send(self.command.spawn()) {
            // Its caller waits no more.
            drop(child.kill());
            drop(child.wait());
        }
    }
}

static CHILD_POOL: Mutex<Option<Sender<Job>>> = Mutex::new(None);

/// Starts `command` on the thread that outlives everything.
fn spawn(command: Command, deadline: Instant) -> Result<Child> {
    let (answer, started) = sync_channel(0);
    {
        let mut child_pool = CHILD_POOL.lock().unwrap_or_else(PoisonError::into_inner);
        let sender = match &*child_pool {
            Some(sender) => sender,
            None => {
                let (sender, jobs) = channel::<Job>();
                start_thread("ox-isolate", move || {
                    // The sender above is never dropped: this ends with the process.
                    jobs.into_iter().for_each(Job::run);
                })?;
                child_pool.insert(sender)
            }
        };
        drop(sender.send(Job {
            command,
            deadline,
            answer,
        }));
    }
    started
        .recv_timeout(time_left(deadline))
        .map_err(|_| Error::timeout("starting a child process took too long"))?
        .map_err(|e| Error::io("start a child process", e))
}

/// A child whose backend is loaded.
pub(crate) struct Started {
    pub(crate) link: Arc<Link>,
    pub(crate) capabilities: Capabilities,
}

/// How long the end of a child that closed its socket may take to be known.
const LAST_NEWS: Duration = Duration::from_secs(5);

/// Starts a child and waits until its backend is loaded, `start_timeout` or until `deadline`.
pub(crate) fn start(
    options: &IsolateOptions,
    pool: &Arc<Pool>,
    deadline: Instant,
    cancel: &Cancel,
) -> Result<Started> {
    let began = Instant::now();
    let deadline = deadline.min(deadline_in(options.start_timeout));
    let program = options.helper.program()?;
    let (socket, childs) = channel::pair()?;
    let (store, childs_store) = channel::pair()?;
    let (express, childs_express) = channel::pair()?;
    let mut command = Command::new(&program);
    // For people who look at the list of processes.
    std::os::unix::process::CommandExt::arg0(&mut command, format!("ox-isolate:{}", options.backend));
    command
        .env(ENV_CHILD, std::process::id().to_string())
        // The socket is the only descriptor that is inherited; all others are sent through it.
        .stdin(Stdio::from(childs))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    // A group of its own: an interrupt typed at the terminal reaches the parent alone, and what the child starts is ended
    // with it.
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    raw::die_with_parent(&mut command);
    let child = spawn(command, deadline).map_err(|e| named(e, options, &program))?;
    let link = adopt(child, socket, express, store, options, pool)?;
    let hello = Order::Hello {
        greeting: Greeting,
        backend: options.backend.clone(),
        device: options.device.clone(),
        options: options.options.clone(),
        carry: match pool.mode() {
            Mode::Host => Carry::Host,
            Mode::Shared(shared) => Carry::Device(shared.probe().to_vec()),
            Mode::Landed => Carry::Land,
        },
    };
    let (greeting, ready) = sync_channel(1);
    link.expect_greeting(greeting);
    let sent = link.send_with(&hello, &[childs_store, childs_express], deadline);
    let until = match &sent {
        Ok(()) => deadline,
        // It ended before it was asked anything: its keeper knows how.
        Err(_) => deadline.min(deadline_in(LAST_NEWS)),
    };
    let greeted = match cancel.receive(&ready, until) {
        Ok(Some(result)) => result,
        Err(cancelled) => Err(cancelled),
        Ok(None) => Err(sent.err().unwrap_or_else(|| {
            Error::timeout(format!(
                "the child process did not say within {:.1} s that backend '{}' is loaded; does {} call \
                 isolate::run_child_if_asked() first thing in main?{}",
                began.elapsed().as_secs_f64(),
                options.backend,
                program.display(),
                link.tail.text(),
            ))
        })),
    };
    match greeted {
        Ok(capabilities) => Ok(Started { link, capabilities }),
        Err(e) => {
            link.end(e.clone(), None, Duration::ZERO);
            Err(named(e, options, &program))
        }
    }
}

fn named(e: Error, options: &IsolateOptions, program: &std::path::Path) -> Error {
    match e.kind() {
        ErrorKind::Io => Error::new(
            ErrorKind::Unavailable,
            format!(
                "isolated '{}': cannot run {}: {}",
                options.backend,
                program.display(),
                e.message()
            ),
        )
        .with_source(e),
        _ => e,
    }
}

/// Takes over a process that was just started: from here on its keeper sees to its end.
fn adopt(
    mut child: Child,
    socket: OwnedFd,
    express: OwnedFd,
    store: OwnedFd,
    options: &IsolateOptions,
    pool: &Arc<Pool>,
) -> Result<Arc<Link>> {
    let socket = Arc::new(socket);
    let made = Link::new(&child, socket.clone(), express, options, pool.clone()).and_then(|link| {
        let link = Arc::new(link);
        let stores = Stores::serve(store, link.pid)?;
        link.set_stores(stores);
        Ok(link)
    });
    let link = match made {
        Ok(link) => link,
        Err(e) => {
            // No thread would watch over it.
            drop(child.kill());
            drop(child.wait());
            return Err(e);
        }
    };
    Keeper::start(link.clone(), child, socket)?;
    Ok(link)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Children of this process that run `sleep`, or have: no other test starts one.
    fn sleepers() -> usize {
        let me = std::process::id().to_string();
        let is_one = |process: std::fs::DirEntry| {
            let stat = std::fs::read_to_string(process.path().join("stat")).ok()?;
            let (name, rest) = stat.rsplit_once(')')?;
            Some(name.ends_with("(sleep") && rest.split_whitespace().nth(1)? == me)
        };
        std::fs::read_dir("/proc")
            .unwrap()
            .filter_map(|process| is_one(process.ok()?))
            .filter(|&is_one| is_one)
            .count()
    }

    fn sleep() -> Command {
        let mut command = Command::new("sleep");
        command.arg("20");
        command
    }

    #[test]
    fn a_process_whose_caller_waits_no_more_is_not_started_or_does_not_stay() {
        let soon = || deadline_in(Duration::from_secs(20));
        let (answer, gone) = sync_channel(0);
        drop(gone);
        Job {
            command: sleep(),
            deadline: soon(),
            answer,
        }
        .run();
        assert_eq!(sleepers(), 0, "it was not ended, or not collected");
        let late = spawn(sleep(), Instant::now()).unwrap_err();
        assert_eq!(late.kind(), ErrorKind::Timeout);
        // In its turn, so that the one above has had its own.
        spawn(Command::new("true"), soon()).unwrap().wait().unwrap();
        assert_eq!(sleepers(), 0, "it was started too late");
    }
}
