//! Operations of training on ranks: programs with one or two split dimensions give the results of the whole program.
//!
//! A small sharder splits every dimension that it is told to wherever an operation allows it, and takes pending sums when
//! somebody asks; so every factor rule is put to the test by every program that uses the operation.

use ithaca_ir::mesh::AxisId;
use ithaca_ir::module::Output;
use ithaca_ir::{
    Arena, DimId, FunctionBuilder, Layout, Level, Mesh, Module, Op, Space, TensorType, ValueId, text, verify,
};

use super::adjoints::each;
use super::distributed::agree;
use super::noise;
use crate::oracle::{run, run_ranks};
use crate::store::Tensors;
use crate::tensor::Tensor;

/// The dimension that each axis splits.
type Splits = Vec<(DimId, AxisId)>;

fn split(ty: &TensorType, splits: &Splits) -> TensorType {
    let mut layout = Layout::whole(ty.dims.len());
    for (i, dim) in ty.dims.iter().enumerate() {
        layout.split[i] = splits.iter().filter(|(d, _)| d == dim).map(|&(_, axis)| axis).collect();
    }
    ty.with_layout(layout)
}

/// The program with dimensions split wherever that can be.
fn sharded(module: &Module, mesh: Mesh, splits: &Splits) -> Module {
    let space = Space { mesh, ..module.space.clone() };
    let main = &module.functions[module.main().unwrap()];
    let functions = Arena::new();
    let mut b = FunctionBuilder::new("main", &space, &functions);
    let mut map: Vec<ValueId> = Vec::new();
    let none = Splits::new();
    let mut split_nodes = 0;
    for node in &main.nodes {
        let declared: Vec<TensorType> = node.results.iter().map(|&v| main.ty(v).clone()).collect();
        // Everything as it is split, or all whole.
        let mut found = None;
        for splits in [splits, &none] {
            let declared: Vec<TensorType> = if node.operands.is_empty() {
                declared.iter().map(|ty| split(ty, splits)).collect()
            } else {
                declared.clone()
            };
            let wanted: Vec<TensorType> = node.operands.iter().map(|v| split(main.ty(*v), splits)).collect();
            let types: Vec<&TensorType> = wanted.iter().collect();
            let cx = ithaca_ir::ops::Context { space: &space, functions: &functions };
            if node.op.infer(cx, &types, &declared).is_ok() {
                split_nodes += usize::from(!splits.is_empty());
                found = Some((wanted, declared));
                break;
            }
        }
        let (wanted, declared) = found.unwrap();
        let mut operands = Vec::new();
        for (operand, ty) in node.operands.iter().zip(wanted) {
            let held = map[ithaca_ir::entity::Entity::index(*operand)];
            operands.push(if *b.ty(held) == ty {
                held
            } else {
                b.push_as(Op::Reshard, &[held], ty).unwrap()
            });
        }
        map.extend(b.node(node.op.clone(), &operands, &declared).unwrap());
    }
    assert!(split_nodes > 0);
    let mut outputs = Vec::new();
    for output in &main.outputs {
        let held = map[ithaca_ir::entity::Entity::index(output.value)];
        let whole = split(b.ty(held), &none);
        let value = if *b.ty(held) == whole { held } else { b.push_as(Op::Reshard, &[held], whole).unwrap() };
        outputs.push(Output { name: output.name.clone(), value });
    }
    let main = b.finish(outputs);
    let functions = [main].into_iter().collect();
    Module { space, functions, level: Level::Sharded, ..module.emptied(Level::Sharded) }
}

/// Every mesh of two ranks, and of four on two axes or one, with a dimension for each axis.
fn meshes(module: &Module) -> Vec<(Mesh, Splits)> {
    let mut out = Vec::new();
    let main = &module.functions[module.main().unwrap()];
    let dims: Vec<DimId> = module.space.dims.iter().map(|(d, _)| d).collect();
    let mut add = |axes: &[(&str, u64, DimId)]| {
        let mut named: Vec<(&str, u64)> = axes.iter().map(|&(name, n, _)| (name, n)).collect();
        named.dedup();
        let mesh = Mesh::new(named);
        let splits: Splits = axes.iter().map(|&(name, _, d)| (d, mesh.axis(name).unwrap())).collect();
        let space = Space { mesh: mesh.clone(), ..module.space.clone() };
        let fits = dims.iter().all(|&d| {
            let axes: Vec<AxisId> = splits.iter().filter(|s| s.0 == d).map(|s| s.1).collect();
            space.can_split(d, &axes)
        });
        // A tensor cannot be split twice by one axis.
        let twice = |ty: &TensorType| {
            splits
                .iter()
                .any(|s| splits.iter().any(|t| s.0 != t.0 && s.1 == t.1 && ty.has(s.0) && ty.has(t.0)))
        };
        if fits && !main.values.values().any(|value| twice(&value.ty)) {
            out.push((mesh, splits));
        }
    };
    for &d in &dims {
        add(&[("x", 2, d)]);
        add(&[("x", 4, d)]);
        for &e in &dims {
            // As heads and key/value heads are.
            if d < e {
                add(&[("x", 2, d), ("x", 2, e)]);
            }
            add(&[("x", 2, d), ("y", 2, e)]);
        }
    }
    out
}

fn check(name: &str, module: &Module, tensors: &Tensors) {
    let expected = run::<f64>(module, tensors, tensors).unwrap_or_else(|e| panic!("{name}: {e}"));
    for (mesh, splits) in meshes(module) {
        let ranks = sharded(module, mesh, &splits);
        if let Err(d) = verify::verify(&ranks) {
            panic!("{name}: {d:?}\n{}", text::print(&ranks));
        }
        let found = run_ranks::<f64>(&ranks, tensors, tensors)
            .unwrap_or_else(|e| panic!("{name}: {e}\n{}", text::print(&ranks)));
        agree(name, &found, &expected, 1e-11);
    }
}

#[test]
fn gradients_on_ranks_are_those_of_the_whole() {
    each(|name, _, with_gradients, tensors| check(name, with_gradients, tensors));
}

#[test]
fn steps_of_the_optimizer_on_ranks_are_those_of_the_whole() {
    let module = super::distributed::module(
        "ithaca 1 program\nmodel \"step\"\ndim m = 4\ndim e = 8\n\nfunc @main() {\n  \
         %w = input {name=\"w\"} : f32[m e]\n  %g = input {name=\"g\"} : bf16[m e]\n  \
         %m = input {name=\"m\"} : f32[m e]\n  %v0 = input {name=\"v\"} : f32[m e]\n  %v = mul %v0, %v0 : f32[m e]\n  \
         %h = cast %g {to=f32} : f32[m e]\n  %squares = einsum %h, %h : f32[]\n  \
         %clip = clip_factor %squares {max_norm=1.0} : f32[]\n  %step = fill {value=3.0} : f32[]\n  \
         %w1, %m1, %v1 = adamw %w, %g, %m, %v, %step, %clip {lr=0.1, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1} \
         : f32[m e], f32[m e], f32[m e]\n  %fill = fill {value=0.5} : f32[m e]\n  \
         return w = %w1, m = %m1, v = %v1, clip = %clip, fill = %fill\n}\n",
    );
    let tensors: Tensors = ["w", "g", "m", "v"]
        .into_iter()
        .enumerate()
        .map(|(i, name)| (name, Tensor::new(vec![4, 8], noise(32, i as u64))))
        .collect();
    check("step", &module, &tensors);
    // By hand, after the paper.
    let found = run::<f64>(&module, &tensors, &tensors).unwrap();
    let (w, g, m, v) = (noise(32, 0), noise(32, 1), noise(32, 2), noise(32, 3));
    let norm = g.iter().map(|g| g * g).sum::<f64>().sqrt();
    for i in 0..32 {
        let g = g[i] / (norm + 1e-6);
        let (m, v) = (0.9 * m[i] + 0.1 * g, 0.95 * v[i] * v[i] + 0.05 * g * g);
        let (unbiased, square) = (m / (1.0 - 0.9f64.powi(3)), v / (1.0 - 0.95f64.powi(3)));
        let expected = w[i] - 0.1 * 0.1 * w[i] - 0.1 * unbiased / (square.sqrt() + 1e-8);
        assert!((found["w"].data[i] - expected).abs() < 1e-12, "{} is not {expected}", found["w"].data[i]);
    }
}

/// A vocabulary in parts: each rank's sum of exponentials, distinguished by `p`, and the label's logit from the rank that holds it.
#[test]
fn a_loss_over_parts_of_the_vocabulary_is_that_of_the_whole() {
    let dims = "dim b = 2\ndim s = 3\ndim v = 8 valid 7\n";
    let whole = super::distributed::module(&format!(
        "ithaca 1 program\nmodel \"whole\"\n{dims}\nfunc @main() {{\n  %x = input {{name=\"x\"}} : f32[b s v]\n  \
         %i = input {{name=\"i\"}} : i32[b s]\n  %n, %l = cross_entropy %x, %i {{over=v, ignore=-100}} : f32[b s], f32[b s]\n  \
         return nll = %n, lse = %l\n}}\n"
    ));
    let x = Tensor::new(vec![2, 3, 7], noise(42, 5));
    let labels = Tensor::new(vec![2, 3], vec![0.0, -100.0, 6.0, 3.0, 5.0, -100.0]);
    let tensors: Tensors = [("x", x), ("i", labels)].into_iter().collect();
    let expected = run::<f64>(&whole, &tensors, &tensors).unwrap();
    assert_eq!(expected["nll"].data[1], 0.0);
    for p in [2, 4] {
        let ranks = super::distributed::module(&format!(
            "ithaca 1 per_rank\nmodel \"parts\"\nmesh tp={p}\n{dims}dim p = {p}\n\nfunc @main() {{\n  \
             %x = input {{name=\"x\"}} : f32[b s v@tp]\n  %i = input {{name=\"i\"}} : i32[b s]\n  \
             %parts = row_lse %x {{over=v, parts=p}} : f32[p@tp b s]\n  \
             %all = all_gather %parts {{axis=tp, dim=p}} : f32[p b s]\n  %l = row_lse %all {{over=p}} : f32[b s]\n  \
             %part = pick %x, %i {{over=v, ignore=-100}} : f32[b s] partial(tp)\n  \
             %t = all_reduce %part {{axis=tp}} : f32[b s]\n  %d = sub %l, %t : f32[b s]\n  \
             %c = valid %i {{ignore=-100}} : f32[b s]\n  %n = mul %d, %c : f32[b s]\n  return nll = %n, lse = %l\n}}\n"
        ));
        let found = run_ranks::<f64>(&ranks, &tensors, &tensors).unwrap();
        agree("parts", &found, &expected, 1e-12);
    }
}

#[test]
fn a_label_outside_the_vocabulary_is_named_with_its_place() {
    let module = super::distributed::module(
        "ithaca 1 program\nmodel \"label\"\ndim b = 2\ndim s = 3\ndim v = 8 valid 7\n\nfunc @main() {\n  \
         %x = input {name=\"x\"} : f32[b s v]\n  %i = input {name=\"i\"} : i32[b s]\n  \
         %n, %l = cross_entropy %x, %i {over=v, ignore=-100} : f32[b s], f32[b s]\n  return nll = %n\n}\n",
    );
    let x = Tensor::new(vec![2, 3, 7], noise(42, 5));
    for wrong in [7.0, -1.0] {
        let labels = Tensor::new(vec![2, 3], vec![0.0, -100.0, 6.0, 3.0, 5.0, wrong]);
        let tensors: Tensors = [("x", x.clone()), ("i", labels)].into_iter().collect();
        let error = run::<f64>(&module, &tensors, &tensors).unwrap_err().to_string();
        let expected = format!("label {wrong} of the token at [1, 2] is outside a vocabulary of 7 (`v`)");
        assert_eq!(error, expected);
    }
}
