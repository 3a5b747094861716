use oxccl_fleet::published::{MODELS, SHARES, Scheme, TABLE, grid, needed, utilisation};

#[test]
fn the_table_of_streaming_diloco_comes_out_within_one_step_of_its_grid() {
    let grid = grid();
    let (mut exact, mut all) = (0, 0);
    for (model, rows) in MODELS.iter().zip(TABLE) {
        for (scheme, row) in Scheme::ALL.iter().zip(rows) {
            for (share, published) in SHARES.iter().zip(row) {
                let here = needed(model, *scheme, *share);
                // Published in a tenth of a Gbit/s: the nearest of the grid.
                let distance = |i: &usize| (grid[*i] - published).abs();
                let there = (0..grid.len())
                    .min_by(|a, b| distance(a).total_cmp(&distance(b)))
                    .unwrap();
                assert!(
                    here.abs_diff(there) <= 1,
                    "{} {scheme:?} {share}: {:.1} here, {published} published",
                    model.name,
                    grid[here]
                );
                all += 1;
                exact += usize::from(here == there);
            }
        }
    }
    println!("{exact} of {all} rates are the published ones, the others one step of the grid away");
    assert_eq!(all, 75);
}

#[test]
fn more_of_the_line_is_never_worse() {
    for model in &MODELS {
        for scheme in Scheme::ALL {
            let shares: Vec<f64> = grid()
                .iter()
                .step_by(7)
                .map(|r| utilisation(model, scheme, *r))
                .collect();
            assert!(
                shares.is_sorted_by(|a, b| *a <= *b + 1e-9),
                "{} {scheme:?}: {shares:?}",
                model.name
            );
            assert!(shares.iter().all(|s| (0.0..=1.0 + 1e-9).contains(s)));
        }
    }
}
