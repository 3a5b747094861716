//! Strangers on the port of a group that waits for its peers: mutated greetings, noise, half of something, silence. The group
//! connects as soon as its peer comes, and reduces right.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use backend_gloo::GlooGroup;
use ftcore::{
    Configuration, Epoch, GroupOptions, InMemoryStore, ProcessGroup, ProcessGroupExt, ReduceOp, Store,
    Tensor, deadline_in,
};
use libtest_mimic::Failed;

use crate::gloo;
use crate::mutate::Mutator;

fn soon() -> Instant {
    deadline_in(Duration::from_secs(60))
}

fn join(store: &Arc<dyn Store>, rank: u32) -> ftcore::Result<f32> {
    let group = GlooGroup::new("hostile", GroupOptions::default())?;
    group.configure(Configuration {
        store: store.clone(),
        prefix: "hostile".to_string(),
        name: "hostile".to_string(),
        epoch: Epoch(1),
        rank,
        world_size: 2,
        deadline: soon(),
        cancel: Default::default(),
    })?;
    let work = group
        .all_reduce(Tensor::from_vec(vec![rank as f32 + 1.0; 1000]), ReduceOp::Sum)
        .map_err(ftcore::Error::from)?;
    work.wait(soon())?;
    let tensor = work.take_tensor()?;
    Ok(tensor.as_slice::<f32>()?.iter().sum::<f32>() / 1000.0)
}

/// `strangers` of them, of which every tenth stays connected to the end.
pub(crate) fn survives(strangers: u64) -> Result<(), Failed> {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    let (first, second) = std::thread::scope(|scope| {
        let first = scope.spawn(|| join(&store, 0));
        let card = store.get("hostile/1/gloo/0", soon()).unwrap();
        let card = String::from_utf8(card).unwrap();
        let address: SocketAddr = card
            .split(' ')
            .find_map(|f| f.parse().ok())
            .expect("an address in the card");
        let mut mutator = Mutator::new(strangers, gloo::seeds());
        let mut kept = Vec::new();
        for n in 0..strangers {
            // Refused or cut off is a fine answer.
            let Ok(mut stream) = TcpStream::connect(("127.0.0.1", address.port())) else {
                continue;
            };
            let _ = stream.write_all(&mutator.next());
            if n % 10 == 0 && kept.len() < 200 {
                kept.push(stream);
            } else if n % 10 == 1 {
                let _ = stream.set_read_timeout(Some(Duration::from_millis(1)));
                let _ = stream.read(&mut [0; 64]);
            }
        }
        let second = join(&store, 1);
        let first = first.join().map_err(|_| Failed::from("rank 0 panicked"));
        drop(kept);
        (first, second)
    });
    for (rank, sum) in [first?, second].into_iter().enumerate() {
        let sum = sum.map_err(|e| format!("rank {rank}: {e}"))?;
        if sum != 3.0 {
            return Err(format!("rank {rank}: a sum of {sum} instead of 3").into());
        }
    }
    Ok(())
}
