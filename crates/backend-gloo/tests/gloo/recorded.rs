//! Every way of an operation through gloo is in the flight recorder, once, with its end.

use std::sync::Arc;

use ftcore::{
    Collective, Configuration, ProcessGroup, ProcessGroupExt, ReduceOp, SubmitOptions, Tensor,
    flight_recorder,
};

use crate::ranks::{configuration, group_over, soon, store};

/// The operations of the groups with this name, as JSON, one group after the other.
fn operations(name: &str) -> Vec<String> {
    let record = flight_recorder::record_text("a test");
    let ours = record
        .split("\n{\"overwritten\"")
        .filter(|group| group.contains(&format!("\"name\":\"{name}\"")));
    let lines = ours.flat_map(|group| group.lines());
    lines
        .filter(|line| line.contains("\"op\":"))
        .map(str::to_string)
        .collect()
}

fn all_reduce(n: usize) -> Collective {
    Collective::AllReduce {
        tensors: vec![Tensor::from_vec(vec![1f32; n])],
        op: ReduceOp::Sum,
    }
}

/// Two ranks over `transport`, and what they do: the record of it, taken before their groups go. Of groups that have gone it keeps only some, and
/// other tests make many.
fn both(name: &str, transport: &str, body: impl Fn(u32, &dyn ProcessGroup) + Sync) -> Vec<String> {
    let store = store();
    std::thread::scope(|scope| {
        let (store, body) = (&store, &body);
        let ranks = [0, 1].map(|rank| {
            scope.spawn(move || {
                let group = group_over(transport);
                let given = configuration(store, 1, rank, 2);
                group
                    .configure(Configuration {
                        name: name.into(),
                        ..given
                    })
                    .unwrap();
                body(rank, &group);
                group
            })
        });
        let _groups = ranks.map(|rank| rank.join().unwrap());
        operations(name)
    })
}

#[test]
fn blocking_submitted_and_alone_each_operation_is_recorded_once() {
    for transport in ["shm", "tcp"] {
        let name = format!("recorded over {transport}");
        let recorded = both(&name, transport, |rank, group| {
            let options = || SubmitOptions::by(soon());
            // The short way, the long one, through the queue.
            group.run_blocking(all_reduce(1), options()).unwrap();
            group.run_blocking(all_reduce(1 << 20), options()).unwrap();
            group.run(all_reduce(3), options()).unwrap().wait_done().unwrap();
            let tensor = || Tensor::from_vec(vec![1u8; 5]);
            let message = |blocking: bool| {
                let op = match rank {
                    0 => Collective::Send {
                        tensor: tensor(),
                        peer: 1,
                        tag: 4,
                    },
                    _ => Collective::Recv {
                        tensor: tensor(),
                        peer: Some(0),
                        tag: 4,
                    },
                };
                match blocking {
                    true => drop(group.run_blocking(op, options()).unwrap()),
                    false => group.run(op, options()).unwrap().wait_done().unwrap(),
                }
            };
            message(true);
            message(false);
        });
        assert_eq!(recorded.len(), 10, "{recorded:#?}");
        for line in &recorded {
            assert!(
                line.contains("\"state\":\"done\"") && line.contains("\"ended_ns\":"),
                "{line}"
            );
            assert!(line.contains("\"started_ns\":"), "{line}");
        }
        for seq in 0..3 {
            let those = recorded
                .iter()
                .filter(|l| l.contains("all_reduce") && l.contains(&format!("\"seq\":{seq},")));
            assert_eq!(those.count(), 2, "#{seq}: {recorded:#?}");
        }
        let sends = recorded
            .iter()
            .filter(|l| l.contains("\"op\":\"send\"") && l.contains("\"peer\":1,\"tag\":4"));
        assert_eq!(sends.count(), 2, "{recorded:#?}");
    }
}

#[test]
fn a_failure_is_recorded_with_its_reason_on_every_rank_and_a_later_call_as_refused() {
    let name = "recorded failures";
    let recorded = both(name, "auto", |rank, group| {
        let op = all_reduce(if rank == 0 { 4 } else { 5 });
        group.run_blocking(op, SubmitOptions::by(soon())).unwrap_err();
        group
            .run_blocking(Collective::Barrier, SubmitOptions::by(soon()))
            .unwrap_err();
    });
    let of = |state: &str| {
        let those = recorded
            .iter()
            .filter(|l| l.contains(&format!("\"state\":\"{state}\"")));
        those.filter(|l| l.contains("\"reason\":")).count()
    };
    assert_eq!(
        (recorded.len(), of("failed"), of("refused")),
        (4, 2, 2),
        "{recorded:#?}"
    );
}

#[test]
fn a_world_of_one_is_recorded_too() {
    let store: Arc<_> = store();
    let group = group_over("auto");
    let given = configuration(&store, 1, 0, 1);
    group
        .configure(Configuration {
            name: "recorded alone".into(),
            ..given
        })
        .unwrap();
    group
        .run_blocking(all_reduce(2), SubmitOptions::by(soon()))
        .unwrap();
    let recorded = operations("recorded alone");
    assert_eq!(recorded.len(), 1, "{recorded:#?}");
    assert!(recorded[0].contains("\"state\":\"done\""), "{recorded:#?}");
}
