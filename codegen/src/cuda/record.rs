//! Records as calls of the frame's runtime: launches, products, copies, transfers.

use ithaca_device::{
    Activation, Address, Arg, ArgType, Block, Collective, Communicator, Even, Form, Grid, Int, Launch,
    Matrix, Members, Product, Record, Region, Scalar, Transfer, Varying, Word,
};
use ithaca_ir::DType;
use ithaca_ir::entity::Entity;
use ithaca_ir::message::{RunPlaces, Runs};
use ithaca_ir::schedule::Stream;

use super::names;
use super::number::Numbers;

/// Returns the base pointer of an address in a region, and its offset from the region's start.
pub(super) type Pointers<'p> = dyn Fn(Region, i64) -> (String, i64) + 'p;

/// Prints records with the names that their expressions use.
#[derive(Clone, Copy)]
pub(super) struct Writer<'w, 'a> {
    pub(super) numbers: &'w Numbers<'a>,
    pub(super) pointers: &'w Pointers<'w>,
    /// The communicators of streams other than the communication stream.
    pub(super) communicators: &'w [Communicator],
}

impl Writer<'_, '_> {
    /// The statements of records, in order of issue.
    pub(super) fn records(&self, records: &[Record]) -> Vec<String> {
        let mut lines = Vec::new();
        let mut rest = records;
        while let [first, ..] = rest {
            let n = match first {
                Record::Product(product) => self.products(product, rest, &mut lines),
                Record::Launch(_) | Record::Pair(_) | Record::Copy { .. } | Record::Transfer(_) => {
                    lines.push(self.record(first));
                    1
                }
            };
            rest = &rest[n..];
        }
        lines
    }

    fn record(&self, record: &Record) -> String {
        match record {
            Record::Launch(launch) => self.launch(launch),
            Record::Product(product) => self.product(product, [&Int::ZERO; 5]),
            Record::Pair(pair) => self.pair(pair),
            Record::Copy { from, to, bytes } => {
                let (from, to, bytes) = (self.address(from), self.address(to), self.numbers.int(bytes));
                format!("s.copy({to}, {from}, {bytes});")
            }
            Record::Transfer(transfer) => self.transfer(transfer),
        }
    }

    /// Prints evenly spaced products as a loop. Returns the number of records in it.
    fn products(&self, first: &Product, rest: &[Record], lines: &mut Vec<String>) -> usize {
        let others = rest.iter().skip(1).map_while(|record| match record {
            Record::Product(product) => distances(first, product),
            Record::Launch(_) | Record::Pair(_) | Record::Copy { .. } | Record::Transfer(_) => None,
        });
        let distances: Vec<[i64; 5]> = others.collect();
        let Some(&step) = distances.first() else {
            lines.push(self.product(first, [&Int::ZERO; 5]));
            return 1;
        };
        let is_even = |(i, d): (usize, &[i64; 5])| {
            let i = i64::try_from(i).unwrap_or(i64::MAX);
            d.iter().zip(step).all(|(d, step)| step.checked_mul(i + 1) == Some(*d))
        };
        let n = 1 + distances.iter().enumerate().take_while(|&pair| is_even(pair)).count();
        lines.push(format!("for (int64_t k = 0; k < {n}; ++k)"));
        let steps = step.map(Int::Const);
        lines.push(format!("    {}", self.product(first, steps.each_ref())));
        n
    }

    fn launch(&self, launch: &Launch) -> String {
        let grid = match &launch.grid {
            Grid::Threads(threads) => {
                format!("s.launch(kernel::{}, {}", launch.kernel, self.numbers.int(threads))
            }
            Grid::Blocks { blocks, threads, shared_bytes } => format!(
                "s.launch_blocks(kernel::{}, {}, {threads}, {shared_bytes}",
                launch.kernel,
                self.numbers.int(blocks)
            ),
        };
        let args: String = launch.args.iter().map(|arg| format!(", {}", self.arg(arg))).collect();
        format!("{grid}{args});")
    }

    fn product(&self, product: &Product, steps: [&Int; 5]) -> String {
        let Product {
            dtype,
            result,
            rows,
            columns,
            inner,
            batch,
            a,
            b,
            before,
            bias,
            bias_step,
            activation,
            c,
        } = product;
        let sizes: Vec<String> = [rows, columns, inner, batch].map(|n| self.numbers.int(n)).into();
        let mut operands = Vec::new();
        for (matrix, step) in [a, b, c].into_iter().zip(steps) {
            operands.push(self.matrix(matrix, step));
        }
        if *before != Address::NULL {
            operands.push(self.moved(before, steps[3]));
        }
        if *bias != Address::NULL {
            let (at, step) = (self.moved(bias, steps[4]), self.numbers.int(bias_step));
            operands.push(format!("Epilogue{{{}, {at}, {step}}}", epilogue(*activation)));
        }
        format!("s.product({}, {}, {});", types(*dtype, *result), sizes.join(", "), operands.join(", "))
    }

    fn pair(&self, pair: &[Product; 2]) -> String {
        let Product { dtype, result, rows, columns, inner, .. } = &pair[0];
        let sizes = [rows, columns, inner].map(|n| self.numbers.int(n)).join(", ");
        let matrices = |product: &Product| {
            let all = [&product.a, &product.b, &product.c].map(|matrix| self.matrix(matrix, &Int::ZERO));
            format!("{{{{{}}}}}", all.join(", "))
        };
        let [first, second] = pair.each_ref().map(matrices);
        format!("s.pair({}, {sizes}, {first}, {second});", types(*dtype, *result))
    }

    fn matrix(&self, matrix: &Matrix, further: &Int) -> String {
        let op = match matrix.form {
            Form::Plain => "CUBLAS_OP_N",
            Form::Transposed => "CUBLAS_OP_T",
        };
        let at = self.moved(&matrix.at, further);
        let [leading, step] = [&matrix.leading, &matrix.step].map(|n| self.numbers.int(n));
        format!("{{{at}, {op}, {leading}, {step}}}")
    }

    /// An address in the step `k` of a loop.
    fn moved(&self, at: &Address, further: &Int) -> String {
        let at = self.address(at);
        match further.constant() {
            Some(step) if step != 0 => format!("{at} + k * {step}"),
            _ => at,
        }
    }

    /// The number of a communicator: all ranks, along each axis, then those that the mesh does not have anyway.
    fn communicator(&self, communicator: Communicator) -> String {
        match (communicator.members, communicator.stream) {
            (Members::World, Stream::Comm) => "kWorld".to_owned(),
            (Members::Along(axes), Stream::Comm) if axes.len() == 1 => (1 + axes[0].index()).to_string(),
            _ => {
                let own = self.communicators.iter().position(|own| *own == communicator);
                let own = own.expect("the schedule's communicators are listed");
                (1 + self.numbers.mesh.axes.len() + own).to_string()
            }
        }
    }

    fn transfer(&self, transfer: &Transfer) -> String {
        let among = self.communicator(transfer.communicator);
        let head = format!("{among}, {}", names::dtype(transfer.dtype));
        match &transfer.collective {
            Collective::Even { kind, from, to, count } => {
                let name = match kind {
                    Even::AllToAll => "all_to_all",
                    Even::AllGather => "all_gather",
                    Even::ReduceScatter => "reduce_scatter",
                    Even::AllReduce => "all_reduce",
                };
                let (from, to, count) = (self.address(from), self.address(to), self.numbers.int(count));
                format!("s.{name}({head}, {from}, {to}, {count});")
            }
            Collective::Filled { from, to, outgoing, incoming, runs, sent, received } => {
                let addresses = [from, to, outgoing, incoming].map(|at| self.address(at)).join(", ");
                let Runs { n, rows, width } = runs;
                let [sent, received] = [sent, received].map(|RunPlaces { adjacent, again, member }| {
                    format!("{{{adjacent}, {again}, {member}}}")
                });
                format!("s.filled_rows({head}, {addresses}, {n}, {rows}, {width}, {sent}, {received});")
            }
            Collective::SendReceive { sends, receives } => {
                let (sends, receives) = (self.blocks(sends), self.blocks(receives));
                format!("s.exchange({head}, {sends}, {receives});")
            }
            Collective::Reduce { blocks, to } => {
                let (blocks, to) = (self.blocks(blocks), self.address(to));
                format!("s.reduce({head}, {blocks}, {to});")
            }
        }
    }

    /// Blocks for peers; evenly spaced blocks for consecutive peers are one entry.
    fn blocks(&self, blocks: &[Block]) -> String {
        let mut entries = Vec::new();
        let mut rest = blocks;
        while let [first, ..] = rest {
            let steps: Vec<Option<(i64, i64)>> =
                rest.iter().skip(1).map(|block| block_distance(first, block)).collect();
            let mut n = 1;
            let mut step = (1, 0);
            if let Some(&Some(found)) = steps.first() {
                step = found;
                let is_even = |(i, d): (usize, &Option<(i64, i64)>)| {
                    let i = i64::try_from(i + 1).unwrap_or(i64::MAX);
                    *d == Some((step.0 * i, step.1 * i))
                };
                n = 1 + steps.iter().enumerate().take_while(|&pair| is_even(pair)).count();
            }
            let (peer, at, count) =
                (self.numbers.int(&first.peer), self.address(&first.at), self.numbers.int(&first.count));
            entries.push(match n {
                1 => format!("{{{peer}, {at}, {count}}}"),
                _ => format!("{{{peer}, {at}, {count}, {n}, {}, {}}}", step.0, step.1),
            });
            rest = &rest[n..];
        }
        format!("{{{}}}", entries.join(", "))
    }

    /// A pointer.
    pub(super) fn address(&self, address: &Address) -> String {
        let base = match &address.offset {
            Int::Const(bytes) => *bytes,
            Int::Varying(varying) => varying.base,
        };
        let (pointer, start) = (self.pointers)(address.region, base);
        let further = address.offset.clone().plus(-start);
        self.numbers.plus(&pointer, &further)
    }

    fn arg(&self, arg: &Arg) -> String {
        let mut words = arg.words.iter();
        let value = self.value(&arg.ty, "", &mut words);
        match &arg.ty {
            ArgType::Scalar(_) | ArgType::Array(..) => value,
            ArgType::Struct(ty) => format!("{}{value}", ty.name.trim_start_matches("ithaca::")),
        }
    }

    /// The initializer of a value; `field` is the field that it is for.
    fn value(&self, ty: &ArgType, field: &str, words: &mut std::slice::Iter<'_, Word>) -> String {
        match ty {
            ArgType::Scalar(scalar) => {
                let word = words.next().expect("an argument has a word for each scalar of its type");
                self.scalar(*scalar, field, word)
            }
            ArgType::Array(n, of) => {
                let mut values: Vec<String> = (0..*n).map(|_| self.value(of, "", words)).collect();
                // The rest of an array is zero.
                while values.last().is_some_and(|value| value == "0" || value == "{}" || value == "nullptr") {
                    values.pop();
                }
                format!("{{{}}}", values.join(", "))
            }
            ArgType::Struct(ty) => {
                let values: Vec<String> =
                    ty.fields.iter().map(|(name, field)| self.value(field, name, words)).collect();
                let is_zero = |value: &String| {
                    matches!(value.as_str(), "0" | "0u" | "{}" | "nullptr" | "false" | "0.0" | "Storage::F64")
                };
                if values.iter().all(is_zero) {
                    "{}".to_owned()
                } else {
                    format!("{{{}}}", values.join(", "))
                }
            }
        }
    }

    fn scalar(&self, scalar: Scalar, field: &str, word: &Word) -> String {
        match (word, scalar) {
            (Word::Address(Address { region: Region::Null, .. }), _) => "nullptr".to_owned(),
            (Word::Address(address), _) => self.address(address),
            (Word::Real(value), _) => names::double(*value),
            (Word::Int(Int::Const(value)), Scalar::Bool) => (*value != 0).to_string(),
            (Word::Int(int), Scalar::Bool) => format!("{} != 0", self.numbers.int(int)),
            (Word::Int(Int::Const(value)), Scalar::U64) => format!("{}u", value.cast_unsigned()),
            (Word::Int(Int::Const(value)), _) if field == "storage" => {
                let storages = ["Storage::F64", "Storage::F32", "Storage::F16", "Storage::BF16"];
                let storage = usize::try_from(*value).ok().and_then(|value| storages.get(value));
                storage.map_or_else(|| format!("Storage({value})"), |&storage| storage.to_owned())
            }
            (Word::Int(int), _) => self.numbers.int(int),
        }
    }
}

/// The types of a product, as its runtime takes them.
fn types(operands: DType, result: DType) -> String {
    let [one, other] = [operands, result].map(names::dtype);
    if operands == result { one.to_owned() } else { format!("{{{one}, {other}}}") }
}

/// The epilogue of cuBLASLt that adds a bias.
fn epilogue(activation: Activation) -> &'static str {
    match activation {
        Activation::Identity => "CUBLASLT_EPILOGUE_BIAS",
        Activation::Relu => "CUBLASLT_EPILOGUE_RELU_BIAS",
        Activation::GeluTanh => "CUBLASLT_EPILOGUE_GELU_BIAS",
    }
}

/// The distances in bytes between the matrices of two products; `None` if the products differ otherwise.
fn distances(first: &Product, other: &Product) -> Option<[i64; 5]> {
    let moved = Product {
        a: Matrix { at: first.a.at.clone(), ..other.a.clone() },
        b: Matrix { at: first.b.at.clone(), ..other.b.clone() },
        before: first.before.clone(),
        bias: first.bias.clone(),
        c: Matrix { at: first.c.at.clone(), ..other.c.clone() },
        ..other.clone()
    };
    let addresses = |product: &Product| {
        [&product.a.at, &product.b.at, &product.c.at, &product.before, &product.bias].map(Address::clone)
    };
    let mut apart = [0; 5];
    for (apart, (first, other)) in apart.iter_mut().zip(addresses(first).iter().zip(&addresses(other))) {
        *apart = address_distance(first, other)?;
    }
    (moved == *first).then_some(apart)
}

fn block_distance(first: &Block, other: &Block) -> Option<(i64, i64)> {
    let peers = int_distance(&first.peer, &other.peer)?;
    (first.count == other.count).then_some((peers, address_distance(&first.at, &other.at)?))
}

fn address_distance(first: &Address, other: &Address) -> Option<i64> {
    (first.region == other.region).then(|| int_distance(&first.offset, &other.offset))?
}

/// The difference of two integers, if it is the same on all ranks.
pub(super) fn int_distance(first: &Int, other: &Int) -> Option<i64> {
    match (first, other) {
        (Int::Const(a), Int::Const(b)) => b.checked_sub(*a),
        (Int::Varying(a), Int::Varying(b)) => {
            let moved = Varying { base: a.base, ..(**b).clone() };
            (moved == **a).then(|| b.base.checked_sub(a.base))?
        }
        (Int::Const(_), Int::Varying(_)) | (Int::Varying(_), Int::Const(_)) => None,
    }
}

#[cfg(test)]
mod tests {
    use ithaca_ir::{AxisId, DType, Mesh};

    use super::*;

    fn printed(records: &[Record]) -> Vec<String> {
        let mesh = Mesh::new([("ring", 4)]);
        let numbers = Numbers::new(&mesh);
        let pointers: &Pointers<'_> = &|region, _| match region {
            Region::Frame => ("x".to_owned(), 64),
            _ => ("y".to_owned(), 0),
        };
        Writer { numbers: &numbers, pointers, communicators: &[] }.records(records)
    }

    fn at(region: Region, offset: i64) -> Address {
        Address { region, offset: Int::Const(offset) }
    }

    #[test]
    fn products_at_even_distances_are_a_loop() {
        let product = |i: i64| {
            let matrix = |region, bytes| Matrix {
                at: at(region, bytes),
                form: Form::Plain,
                leading: Int::Const(8),
                step: Int::ZERO,
            };
            Record::Product(Product {
                dtype: DType::F32,
                result: DType::F32,
                rows: Int::Const(8),
                columns: Int::Const(4),
                inner: Int::Const(2),
                batch: Int::Const(1),
                a: matrix(Region::Argument(0), 0),
                b: matrix(Region::Frame, 64 + 32 * i),
                before: Address::NULL,
                bias: Address::NULL,
                bias_step: Int::ZERO,
                activation: Activation::Identity,
                c: matrix(Region::Frame, 1024 + 128 * i),
            })
        };
        let lines = printed(&[product(0), product(1), product(2), product(4)]);
        assert_eq!(
            lines,
            [
                "for (int64_t k = 0; k < 3; ++k)",
                "    s.product(DType::F32, 8, 4, 2, 1, {y, CUBLAS_OP_N, 8, 0}, {x + k * 32, CUBLAS_OP_N, 8, 0}, \
                 {x + 960 + k * 128, CUBLAS_OP_N, 8, 0});",
                "s.product(DType::F32, 8, 4, 2, 1, {y, CUBLAS_OP_N, 8, 0}, {x + 128, CUBLAS_OP_N, 8, 0}, \
                 {x + 1472, CUBLAS_OP_N, 8, 0});",
            ]
        );
    }

    #[test]
    fn blocks_at_even_distances_are_one_entry() {
        use ithaca_ir::entity::Entity;
        use ithaca_ir::schedule::Stream;
        let ring = AxisId::new(0);
        let block = |peer: i64, bytes: i64| Block {
            peer: Int::Const(peer),
            at: at(Region::Frame, 64 + bytes),
            count: Int::Const(8),
        };
        let next = Varying { axes: vec![ring], values: vec![1, 2, 3, 0], ..Varying::default() };
        let to_next = Block { peer: next.into_int(), ..block(0, 0) };
        let transfer = |sends, receives| {
            let collective = Collective::SendReceive { sends, receives };
            Record::Transfer(Transfer {
                communicator: Communicator { members: Members::Along(ring.into()), stream: Stream::Comm },
                dtype: DType::BF16,
                collective,
            })
        };
        let lines = printed(&[
            transfer(vec![block(0, 0), block(1, 16), block(2, 32)], Vec::new()),
            transfer(vec![to_next], vec![block(3, 16)]),
        ]);
        assert_eq!(
            lines,
            [
                "s.exchange(1, DType::BF16, {{0, x, 8, 3, 1, 16}}, {});",
                "s.exchange(1, DType::BF16, {{(c.ring + 1) % 4, x, 8}}, {{3, x + 16, 8}});",
            ]
        );
    }

    #[test]
    fn structs_are_initializers() {
        let walk = |words: Vec<Word>| Arg {
            ty: ArgType::Struct(&ithaca_device::argument::StructType {
                name: "ithaca::Reals",
                fields: &[
                    ("data", ArgType::Scalar(Scalar::Pointer)),
                    ("storage", ArgType::Scalar(Scalar::I32)),
                ],
            }),
            words,
        };
        let launch = |args: Vec<Arg>| {
            Record::Launch(Launch {
                kernel: "pick<float>".to_owned(),
                grid: Grid::Threads(Int::Const(8)),
                args,
            })
        };
        let lines = printed(&[launch(vec![
            walk(vec![Word::Address(at(Region::Frame, 64)), Word::Int(Int::Const(3))]),
            walk(vec![Word::Address(Address::NULL), Word::Int(Int::Const(0))]),
            Arg { ty: ArgType::Scalar(Scalar::U64), words: vec![Word::Int(Int::Const(-1))] },
            Arg { ty: ArgType::Scalar(Scalar::Bool), words: vec![Word::Int(Int::Const(1))] },
        ])]);
        assert_eq!(
            lines,
            [
                "s.launch(kernel::pick<float>, 8, Reals{x, Storage::BF16}, Reals{}, 18446744073709551615u, true);"
            ]
        );
    }
}
