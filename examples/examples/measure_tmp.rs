#![allow(missing_docs, clippy::unwrap_used, clippy::indexing_slicing)]
use std::time::Instant;
use oxccl_examples::{text::*, transformer::*};
fn main() {
    let a: Vec<f64> = std::env::args().skip(1).map(|s| s.parse().unwrap()).collect();
    let u = |i: usize| a[i] as usize;
    let config = GptConfig { d_model: u(0), layers: u(1), heads: u(2), seq: u(3) };
    let (rows, steps, lr, seed) = (u(4), u(5), a[6] as f32, u(7) as u64);
    let mut m = Gpt::new(config, seed).unwrap();
    let s = Sampler::new(Text::embedded().unwrap(), 2, rows, config.seq, 1).unwrap();
    let held = s.held_out(8).unwrap();
    let n = m.params().len();
    let mut st: Vec<(Vec<f32>, Vec<f32>)> = (0..n).map(|i| (vec![0.0; m.params().numel(i)], vec![0.0; m.params().numel(i)])).collect();
    println!("params {} tensors {n} held {:.3}", m.params().total(), m.mean_loss(&held).unwrap());
    let (mut tf, mut tb, mut to, mut all) = (vec![], vec![], vec![], vec![]);
    let start = Instant::now();
    let mut hash = 0u64;
    for step in 0..steps {
        let t0 = Instant::now();
        let b = s.batch(0, step as u64).unwrap();
        let loss = m.loss(&b).unwrap();
        let l = loss.to_scalar::<f32>().unwrap();
        hash = hash.rotate_left(7) ^ u64::from(l.to_bits());
        let t1 = Instant::now();
        let g = loss.backward().unwrap();
        let t2 = Instant::now();
        let warm = lr * ((step + 1) as f32 / 20.0).min(1.0);
        let (c1, c2) = (1.0 - 0.9f32.powi(step as i32 + 1), 1.0 - 0.99f32.powi(step as i32 + 1));
        for i in 0..n {
            let (mm, vv) = &mut st[i];
            m.params_mut().with_slice_mut_and_grad(&g, i, |w, g| {
                for (((w, g), m), v) in w.iter_mut().zip(g).zip(mm).zip(vv) {
                    *m = 0.9 * *m + 0.1 * g; *v = 0.99 * *v + 0.01 * g * g;
                    *w -= warm * (*m / c1 / ((*v / c2).sqrt() + 1e-8) + 0.01 * *w);
                }
            }).unwrap();
        }
        let t3 = Instant::now();
        tf.push(t1 - t0); tb.push(t2 - t1); to.push(t3 - t2); all.push(t3 - t0);
        if (step + 1) % (steps / 8).max(1) == 0 { println!("step {} loss {l:.3} held {:.3} t {:.1}", step + 1, m.mean_loss(&held).unwrap(), start.elapsed().as_secs_f32()); }
    }
    for v in [&mut tf, &mut tb, &mut to, &mut all] { v.sort(); }
    println!("median fwd {:?} bwd {:?} opt {:?} all {:?} min {:?} hash {hash:016x}", tf[steps/2], tb[steps/2], to[steps/2], all[steps/2], all[0]);
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    println!("{}", status.lines().filter(|l| l.starts_with("Threads") || l.starts_with("VmHWM")).collect::<Vec<_>>().join(" "));
}
