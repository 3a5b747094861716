//! A parameter server: workers come, train together over the server's parameters, and go or die, each in a session of its own.
//!
//! `parameter_server serve` prints its address; `parameter_server work ADDRESS STEPS` is a worker. A session is a group of two, configured
//! through the server's store: the server is rank 0, the worker rank 1. The worker sends a gradient and gets the parameters back. What goes
//! wrong in a session ends that session: neither the server nor the other workers notice.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ftcore::{
    Configuration, Epoch, Error, GroupOptions, ProcessGroup, ProcessGroupExt, Result, Store, TcpStore,
    TcpStoreServer, Tensor, deadline_in,
};
use oxccl::gloo::GlooGroup;

const PARAMETERS: usize = 1000;
const LEARNING_RATE: f32 = 0.1;
/// How many workers have come so far. A worker's number is also that of its session.
const WORKERS: &str = "workers";

fn soon() -> Instant {
    deadline_in(Duration::from_secs(30))
}

/// The two ends of session `number`.
fn session(store: &Arc<dyn Store>, number: i64, rank: u32) -> Result<GlooGroup> {
    let group = GlooGroup::new(format!("session {number}"), GroupOptions::default())?;
    group.configure(Configuration {
        store: store.clone(),
        prefix: format!("session/{number}"),
        name: format!("session {number}"),
        epoch: Epoch(1),
        rank,
        world_size: 2,
        deadline: soon(),
        cancel: Default::default(),
    })?;
    Ok(group)
}

fn serve() -> Result<()> {
    let server = TcpStoreServer::bind("127.0.0.1:0")?;
    println!("{}", server.local_addr());
    let store: Arc<dyn Store> = Arc::new(TcpStore::connect(&server.local_addr().to_string(), soon())?);
    let parameters = Arc::new(Mutex::new(vec![0.0f32; PARAMETERS]));
    let mut number = 1;
    loop {
        // The counter alone says that a worker has come: one that dies behind that call costs its own session only.
        while store.add(WORKERS, 0, soon())? < number {
            std::thread::sleep(Duration::from_millis(10));
        }
        let (store, parameters) = (store.clone(), parameters.clone());
        let thread = std::thread::Builder::new().name("ox-session".to_string());
        let begun = thread.spawn(move || {
            let end = session(&store, number, 0).and_then(|group| attend(&group, &parameters));
            eprintln!("session {number} ends: {end:?}");
        });
        begun.map_err(|e| Error::io("cannot start the thread ox-session", e))?;
        number += 1;
    }
}

/// One session: applies each gradient that comes, and answers with the parameters.
fn attend(group: &GlooGroup, parameters: &Mutex<Vec<f32>>) -> Result<()> {
    loop {
        let gradient = group
            .recv(Tensor::from_vec(vec![0.0f32; PARAMETERS]), 1, 0)?
            .take_tensor()?;
        let now = {
            let mut parameters = parameters.lock().unwrap_or_else(PoisonError::into_inner);
            for (p, g) in parameters.iter_mut().zip(gradient.as_slice::<f32>()?) {
                *p -= LEARNING_RATE * g;
            }
            parameters.clone()
        };
        group.send(Tensor::from_vec(now), 1, 0)?.take()?;
    }
}

/// Gradients of half the squared distance to 3, at the parameters that came last.
fn work(address: &str, steps: u32) -> Result<()> {
    let store: Arc<dyn Store> = Arc::new(TcpStore::connect(address, soon())?);
    let number = store.add(WORKERS, 1, soon())?;
    let group = session(&store, number, 1)?;
    let mut now = vec![3.0; PARAMETERS];
    for _ in 0..steps {
        let gradient = now.iter().map(|p| p - 3.0).collect();
        group.send(Tensor::from_vec(gradient), 0, 0)?.take()?;
        let parameters = group
            .recv(Tensor::from_vec(vec![0.0f32; PARAMETERS]), 0, 0)?
            .take_tensor()?;
        now.copy_from_slice(parameters.as_slice::<f32>()?);
    }
    println!("session {number}: {}", now.first().copied().unwrap_or_default());
    group.shutdown(soon())
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve"] => serve(),
        ["work", address, steps] => work(
            address,
            steps
                .parse()
                .map_err(|_| Error::invalid(format!("'{steps}' is no number of steps")))?,
        ),
        _ => Err(Error::invalid(
            "parameter_server serve | parameter_server work ADDRESS STEPS",
        )),
    }
}
