use oxccl_fleet::{Failures, Job, Link, Links, Plan, Rate, Seconds, plan, simulate};

fn seconds(s: f64) -> Seconds {
    Seconds::new(s).unwrap()
}

fn job(parameters: u64, step: f64, every: Option<f64>) -> Job {
    Job {
        parameters,
        layers: 24,
        step: seconds(step),
        tokens: 16_384,
        per_value: Seconds::ZERO,
        bucket: 1 << 18,
        failures: Failures {
            every: every.map(seconds),
            restart: seconds(60.0),
            notice: seconds(0.1),
            reconnect: seconds(1.0),
            state: 16,
        },
        target: 0.95,
    }
}

fn planned(hosts: u32, ranks: u32, gbits: f64, delay: f64, job: &Job) -> Plan {
    let between = Link::new(Rate::new(gbits * 1e9).unwrap(), seconds(delay));
    let local = Link::new(Rate::new(2e12).unwrap(), seconds(2e-6));
    plan(&Links::uniform(hosts, ranks, local, between).unwrap(), job).unwrap()
}

#[test]
fn fast_links_need_no_more_than_data_parallel() {
    let plan = planned(4, 8, 800.0, 5e-6, &job(1_000_000_000, 1.0, None));
    let best = plan.best().unwrap();
    assert_eq!(
        (best.method.as_str(), best.format.as_str()),
        ("DDP", "f32"),
        "{}",
        plan.reason
    );
    assert!(best.efficiency >= 0.95 && best.replicas == 4);
}

#[test]
fn slow_links_need_rounds_and_the_slower_the_rarer() {
    let large = Job {
        bucket: 25 << 18,
        ..job(1_000_000_000, 1.0, None)
    };
    let at = |gbits| {
        let plan = planned(4, 8, gbits, 0.02, &large);
        let best = plan.best().unwrap().clone();
        assert!(best.efficiency >= 0.95, "{gbits} Gbit/s: {}", plan.reason);
        best
    };
    let (ten, one) = (at(10.0), at(1.0));
    assert!(
        ten.sync_every > 1 && one.sync_every >= ten.sync_every,
        "{ten:?} {one:?}"
    );
    assert!(one.sent < ten.sent || one.format != ten.format, "{ten:?} {one:?}");
}

#[test]
fn what_no_method_reaches_is_said_with_the_best_there_is() {
    let plan = planned(4, 8, 0.001, 0.2, &job(100_000_000_000, 1.0, None));
    assert!(plan.reason.starts_with("none reaches 95.0 %"), "{}", plan.reason);
    let best = plan.best().unwrap().efficiency;
    assert!(plan.estimates.iter().all(|e| e.efficiency <= best + 1e-9));
}

#[test]
fn the_formula_for_deaths_is_near_what_the_simulation_plays() {
    // Steps of a second.
    for (gbits, every) in [(400.0, 120.0), (10.0, 300.0), (1.0, 600.0)] {
        let plan = planned(16, 8, gbits, 0.002, &job(1_000_000_000, 1.0, Some(every)));
        for e in [plan.best().unwrap(), &plan.estimates[0]] {
            let mut fleet = e.fleet.clone();
            fleet.rounds = 400;
            let played = simulate(&fleet).unwrap();
            // The simulation counts what ranks of a replica wait for each other as work.
            let foreseen = e.efficiency * fleet.work.step.get();
            println!(
                "{} {}: {:.3} {foreseen:.3}",
                e.method, e.format, played.efficiency
            );
            assert!(
                (played.efficiency - foreseen).abs() < 0.05,
                "{} {} at {gbits} Gbit/s, a death each {every} s: {:.3} played, {foreseen:.3} foreseen; {played:?}",
                e.method,
                e.format,
                played.efficiency
            );
        }
    }
}

#[test]
fn a_state_is_healed_over_the_slowest_link_wherever_that_is() {
    let links = Links::from_json(
        r#"{
        "hosts": [{"name": "a"}, {"name": "slow", "rate": "100mbit"}, {"name": "c"}],
        "local": {"rate": "400gbit"}, "between": {"rate": "10gbit", "delay": "50us"}
    }"#,
    )
    .unwrap();
    let plan = plan(&links, &job(1_000_000, 1.0, Some(3600.0))).unwrap();
    // 16 MB at 95.6 % of 100 Mbit/s.
    let heal = plan.best().unwrap().fleet.heal.get();
    assert!((1.3..1.4).contains(&heal), "{heal}");
}

#[test]
fn jobs_that_make_no_sense_are_refused_with_what_to_give() {
    let links = Links::uniform(
        2,
        1,
        Link::new(Rate::new(1e12).unwrap(), Seconds::ZERO),
        Link::new(Rate::new(1e9).unwrap(), Seconds::ZERO),
    );
    let links = links.unwrap();
    let good = job(1_000, 1.0, None);
    for bad in [
        Job {
            parameters: 0,
            ..good.clone()
        },
        Job {
            step: Seconds::ZERO,
            ..good.clone()
        },
        Job {
            target: 1.0,
            ..good.clone()
        },
        Job { tokens: 0, ..good },
    ] {
        assert!(plan(&links, &bad).is_err());
    }
}

#[test]
fn small_buckets_over_long_ways_are_named() {
    let hint = |delay, bucket| {
        let job = Job {
            bucket,
            ..job(1_000_000_000, 1.0, None)
        };
        planned(4, 8, 10.0, delay, &job).hint
    };
    assert!(hint(0.02, 1 << 18).unwrap().contains("bucket_elements"));
    assert_eq!((hint(0.02, 1 << 32), hint(20e-6, 1 << 18)), (None, None));
}
