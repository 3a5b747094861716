//! Who wins a key, what a look-up says, and races.

use super::*;

struct Nothing;
impl BackendFactory for Nothing {
    fn probe(&self) -> Result<()> {
        Err(Error::unsupported("libnothing.so not found"))
    }
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            ops: crate::OpSet::NONE,
            moves: crate::DTypeSet::NONE,
            reduces: Default::default(),
            features: crate::FeatureSet::NONE,
            options: Vec::new(),
            devices: Vec::new(),
            notes: Vec::new(),
        }
    }
    fn create(&self, _: &Device, _: &GroupOptions) -> Result<Box<dyn ProcessGroup>> {
        self.probe().map(|()| unreachable!())
    }
}

fn backend(name: &str, device: DeviceKind, provenance: Provenance, origin: &str) -> Backend {
    let source = Source {
        provenance,
        origin: origin.into(),
        version: "1".into(),
    };
    Backend {
        name: name.into(),
        device,
        source,
        factory: Arc::new(Nothing),
    }
}

#[test]
fn l43_a_second_provider_never_replaces_silently_and_the_stronger_provenance_wins_in_any_order() {
    let plugin = || backend("HCCL", DeviceKind::Hpu, Provenance::Plugin, "/opt/libvendor.so");
    let built_in = || backend("hccl", DeviceKind::Hpu, Provenance::BuiltIn, "backend-hccl");
    for order in [true, false] {
        let r = Registry::new();
        let (a, b) = if order {
            (plugin(), built_in())
        } else {
            (built_in(), plugin())
        };
        assert_eq!(
            r.register(a.clone(), OnConflict::Keep).unwrap(),
            Outcome::Registered
        );
        assert_eq!(r.register(a, OnConflict::Keep).unwrap(), Outcome::AlreadyThere);
        r.register(b, OnConflict::Keep).unwrap();
        assert_eq!(r.get("hccl", None).unwrap().source.provenance, Provenance::Plugin);
        let c = r.conflicts();
        assert_eq!(c.len(), 1);
        assert_eq!(c[0].winner.origin, "/opt/libvendor.so");
    }
    let r = Registry::new();
    r.register(built_in(), OnConflict::Keep).unwrap();
    let e = r.register(plugin(), OnConflict::Strict).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Conflict);
}

#[test]
fn l19_one_name_on_two_devices_is_two_backends_and_a_bare_look_up_says_so() {
    let r = Registry::new();
    r.register(
        backend("hccl", DeviceKind::Hpu, Provenance::Plugin, "gaudi"),
        OnConflict::Keep,
    )
    .unwrap();
    let npu = DeviceKind::Named("npu".into());
    r.register(
        backend("hccl", npu.clone(), Provenance::Plugin, "ascend"),
        OnConflict::Keep,
    )
    .unwrap();
    assert!(r.conflicts().is_empty());
    assert_eq!(r.get("hccl", Some(&npu)).unwrap().source.origin, "ascend");
    let e = r.get("hccl", None).unwrap_err();
    assert!(
        e.to_string().contains("hpu:hccl") && e.to_string().contains("npu:hccl"),
        "{e}"
    );
}

#[test]
fn unknown_names_get_a_suggestion_and_unusable_backends_their_reason() {
    let r = Registry::new();
    r.register(
        backend("gloo", DeviceKind::Cpu, Provenance::BuiltIn, "x"),
        OnConflict::Keep,
    )
    .unwrap();
    let e = r.get("glo", None).unwrap_err();
    assert!(e.to_string().contains("Did you mean 'gloo'?"), "{e}");
    let e = r.is_backend_available("GLOO", None).unwrap_err();
    assert!(e.to_string().contains("libnothing.so"), "{e}");
    assert!(
        r.register(
            backend("a:b", DeviceKind::Cpu, Provenance::Api, "x"),
            OnConflict::Keep
        )
        .is_err()
    );
}

/// 64 threads that register one key at the same moment, each as another provider; (who, what came of it).
fn race(r: &Registry, provenance: fn(usize) -> Provenance) -> Vec<(Source, Outcome)> {
    let start = std::sync::Barrier::new(64);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..64)
            .map(|i| {
                let (start, b) = (
                    &start,
                    backend("one", DeviceKind::Cpu, provenance(i), &format!("crate{i}")),
                );
                scope.spawn(move || {
                    start.wait();
                    (b.source.clone(), r.register(b, OnConflict::Keep).unwrap())
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

#[test]
fn of_64_threads_that_race_for_a_key_exactly_one_wins_and_all_others_are_told_its_name() {
    for _ in 0..50 {
        let r = Registry::new();
        let outcomes = race(&r, |_| Provenance::Api);
        let winner = r.get("one", None).unwrap().source;
        for (source, outcome) in &outcomes {
            if *source == winner {
                assert_eq!(*outcome, Outcome::Registered);
            } else {
                assert_eq!(*outcome, Outcome::Shadowed(winner.clone()));
            }
        }
        let mut losers: Vec<Source> = r.conflicts().into_iter().map(|c| c.loser).collect();
        losers.sort();
        losers.dedup();
        assert_eq!(losers.len(), 63);
        assert!(r.conflicts().iter().all(|c| c.winner == winner));
        assert_eq!(r.list().len(), 1);
    }
}

#[test]
fn in_a_race_of_mixed_provenance_the_outcomes_form_one_chain_up_to_the_strongest() {
    for _ in 0..50 {
        let r = Registry::new();
        let outcomes = race(&r, |i| match i % 3 {
            0 => Provenance::BuiltIn,
            1 => Provenance::Plugin,
            _ => Provenance::Api,
        });
        let mut chain: Vec<&Source> = outcomes
            .iter()
            .filter(|(_, o)| *o == Outcome::Registered)
            .map(|(s, _)| s)
            .collect();
        assert_eq!(chain.len(), 1, "one found the key free");
        while let Some((next, _)) = outcomes
            .iter()
            .find(|(_, o)| matches!(o, Outcome::Replaced(s) if Some(&s) == chain.last()))
        {
            assert!(next.provenance > chain[chain.len() - 1].provenance);
            chain.push(next);
        }
        let replaced = outcomes
            .iter()
            .filter(|(_, o)| matches!(o, Outcome::Replaced(_)))
            .count();
        assert_eq!(replaced + 1, chain.len(), "every replacement is in the chain");
        let winner = r.get("one", None).unwrap().source;
        assert_eq!(winner.provenance, Provenance::Api);
        assert_eq!(chain.last(), Some(&&winner));
        for (source, outcome) in &outcomes {
            if let Outcome::Shadowed(by) = outcome {
                assert!(chain.contains(&by) && by.provenance >= source.provenance);
            }
        }
    }
}

#[test]
fn a_look_up_says_why_what_was_named_for_it_cannot_be_used() {
    let r = Registry::new();
    let reason = |text: &str| Unavailable::InitFailed {
        code: Some(7),
        text: text.into(),
    };
    r.note_unusable(Some("HCCL"), "/opt/h.so", reason("old").into());
    r.note_unusable(Some("hccl"), "/opt/h.so", reason("new").into());
    r.note_unusable(None, "/opt/other.so", reason("other").into());
    assert_eq!(r.unusable().len(), 2);
    let e = r.get("hccl", None).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::NotFound);
    assert!(
        e.to_string().contains("/opt/h.so cannot be used") && e.to_string().contains("new"),
        "{e}"
    );
    assert_eq!(Unavailable::of(&e), Some(&reason("new")));
    let e = r.get("unknown", None).unwrap_err();
    assert!(e.to_string().contains("Not used: /opt/other.so"), "{e}");
    assert_eq!(Unavailable::of(&e), None);
}

inventory::submit! {
    Finder {
        find: || {
            let one = backend("found-when-needed", DeviceKind::Cpu, Provenance::Plugin, "elsewhere");
            Registry::global().register(one, OnConflict::Keep).unwrap();
        },
    }
}

#[test]
fn what_a_finder_brings_is_there_before_the_first_lookup() {
    let found = Registry::global().get("found-when-needed", None).unwrap();
    assert_eq!(found.source.origin, "elsewhere");
    // Other registries get nothing.
    assert!(Registry::new().get("found-when-needed", None).is_err());
}
