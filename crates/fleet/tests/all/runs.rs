use oxccl_fleet::{Fleet, Method, Outcome, Seconds, Workload, lighthouse_call, simulate};

fn seconds(s: f64) -> Seconds {
    Seconds::new(s).unwrap()
}

const DDP: Method = Method::Ddp { overlap: false };

fn fleet(replicas: u32, method: Method, step: f64, reduction: f64, death_every: Option<f64>) -> Fleet {
    let fragments = match method {
        Method::Ddp { .. } => 1,
        Method::Diloco { fragments, .. } => fragments,
    };
    Fleet {
        replicas,
        method,
        work: Workload {
            parameters: 1_000_000,
            layers: 24,
            step: seconds(step),
            quorum: Seconds::ZERO,
            vote: Seconds::ZERO,
            per_value: Seconds::ZERO,
        },
        hidden: Seconds::ZERO,
        reductions: vec![seconds(reduction); fragments as usize],
        death_every: death_every.map(seconds),
        restart: seconds(20.0),
        notice: seconds(0.05),
        reconnect: seconds(0.5),
        heal: seconds(5.0),
        call: Some(Seconds::ZERO),
        rounds: 200,
        seed: 7,
    }
}

fn near(a: f64, b: f64, by: f64) {
    assert!((a - b).abs() <= by, "{a} is not {b}");
}

#[test]
fn without_deaths_a_run_is_its_method() {
    let out = simulate(&fleet(8, DDP, 1.0, 0.25, None)).unwrap();
    assert_eq!(
        (out.committed, out.attempts, out.deaths, out.epochs),
        (200, 200, 0, 1)
    );
    near(out.efficiency, 0.8, 1e-6);
    let diloco = Method::Diloco {
        sync_every: 10,
        fragments: 1,
        delay: 1,
    };
    let out = simulate(&fleet(8, diloco, 1.0, 2.0, None)).unwrap();
    assert_eq!((out.committed, out.attempts), (200, 200));
    near(out.efficiency, 10.0 / 11.0, 0.001);
}

#[test]
fn a_death_costs_an_attempt_and_the_job_goes_on_with_all_replicas() {
    let out = simulate(&fleet(16, DDP, 1.0, 0.25, Some(30.0))).unwrap();
    assert_eq!(out.committed, 200);
    assert!(out.deaths > 2 && out.heals >= out.deaths - 1, "{out:?}");
    assert!(
        out.attempts > 200 && out.attempts <= 200 + out.deaths + 2,
        "{out:?}"
    );
    assert!(out.contributors > 13.0 && out.contributors < 16.0, "{out:?}");
    assert!(out.epochs > out.deaths, "{out:?}");
}

#[test]
fn the_same_seed_gives_the_same_run_and_another_one_another() {
    let run = |seed| {
        let fleet = Fleet {
            seed,
            ..fleet(16, DDP, 1.0, 0.25, Some(30.0))
        };
        simulate(&fleet).unwrap()
    };
    assert_eq!(run(1), run(1));
    assert_ne!(run(1), run(2));
}

#[test]
fn diloco_loses_little_to_a_death_between_its_rounds() {
    let diloco = Method::Diloco {
        sync_every: 30,
        fragments: 1,
        delay: 0,
    };
    let calm = simulate(&fleet(16, diloco, 1.0, 2.0, None)).unwrap();
    let out = simulate(&fleet(16, diloco, 1.0, 2.0, Some(60.0))).unwrap();
    assert!(out.deaths > 50, "{out:?}");
    // A replica that dies loses half a round; another one is away for a round, and waited for in the next.
    assert!(out.useful > 0.93 && out.useful < 1.0, "{out:?}");
    assert!(out.efficiency > 0.7 * calm.efficiency, "{out:?} {calm:?}");
}

#[test]
fn a_slow_lighthouse_is_waited_for() {
    let with = |call| {
        let fleet = Fleet {
            call: Some(seconds(call)),
            ..fleet(100, DDP, 1.0, 0.0, None)
        };
        simulate(&fleet).unwrap()
    };
    // A hundred calls of 5 ms beside a step of 1 s cost nothing; of 20 ms they take twice the step.
    let (quick, slow): (Outcome, Outcome) = (with(0.005), with(0.02));
    near(quick.efficiency, 1.0, 1e-6);
    near(slow.efficiency, 0.5, 0.01);
    near(quick.lighthouse, 0.5, 0.01);
    near(slow.lighthouse, 1.0, 0.01);
}

#[test]
fn the_lighthouse_has_a_time_for_each_size_and_not_for_the_measured_ones_only() {
    let call = |replicas| lighthouse_call(replicas).get();
    near(call(64), 1.4e-3 / 64.0, 1e-9);
    near(call(1_024), 34.7e-3 / 1_024.0, 1e-9);
    // Twice 1,024 is half of the way, by the logarithm, to four times 1,024.
    near(call(2_048), f64::midpoint(call(1_024), call(4_096)), 1e-9);
    let sizes: Vec<f64> = (6..17).map(|power| call(1 << power)).collect();
    assert!(sizes.windows(2).all(|w| w[0] < w[1]), "{sizes:?}");
    // Those beyond follow the last two.
    near(call(65_536) - call(16_384), call(16_384) - call(4_096), 1e-9);
}

#[test]
fn jobs_that_make_no_sense_are_refused() {
    let mut odd = fleet(0, DDP, 1.0, 0.1, None);
    assert!(simulate(&odd).is_err());
    odd = fleet(2, DDP, 1.0, 0.1, Some(0.0));
    assert!(simulate(&odd).is_err());
    odd = fleet(2, DDP, 1.0, 0.1, None);
    odd.reductions.clear();
    assert!(simulate(&odd).is_err());
}
