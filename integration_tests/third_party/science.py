"""Graphs, molecules, physics, differential equations, Gaussian processes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .making import Catalogue, Made, floats, new, tokens


def _graph(name: str, **options: Any) -> Made:
    """A network over one graph of 12 nodes: its batch cannot be cut by rows."""
    edges = torch.stack([torch.arange(24) % 12, (torch.arange(24) * 5 + 1) % 12])
    return new(f"torch_geometric.nn:{name}", **options), {"x": floats(12, 8), "edge_index": edges}


class _Dense(nn.Module):
    """Two dense graph layers over a batch of graphs, as the package's documentation pools them."""

    def __init__(self) -> None:
        super().__init__()
        self.a = new("torch_geometric.nn:DenseGCNConv", 8, 16)
        self.b = new("torch_geometric.nn:DenseSAGEConv", 16, 16)
        self.pool = nn.Linear(16, 3)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        pooling = self.pool(torch.relu(self.a(x, adjacency)))
        x, adjacency, link, entropy = new(
            "torch_geometric.nn:dense_diff_pool", self.a(x, adjacency), adjacency, pooling
        )
        result: Tensor = self.b(x, adjacency)
        return result + link + entropy


def _adjacency(nodes: int = 8) -> Tensor:
    return (torch.rand(4, nodes, nodes) > 0.5).float()


class _Field(nn.Module):
    """The right side of an ordinary differential equation."""

    def __init__(self, width: int = 6, out: int = 6) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, 16), nn.Tanh(), nn.Linear(16, out))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        result: Tensor = self.net(y)
        return result


class _Ode(nn.Module):
    """A layer between projections that solves an equation."""

    def __init__(self, solver: str, **options: Any) -> None:
        super().__init__()
        self.before, self.field, self.after = nn.Linear(4, 6), _Field(), nn.Linear(6, 3)
        self.solver, self.options = solver, options

    def forward(self, x: Tensor) -> Tensor:
        times = torch.linspace(0.0, 1.0, 3, dtype=x.dtype)
        result: Tensor = self.after(
            new(f"torchdiffeq:{self.solver}", self.field, self.before(x), times, **self.options)
        )
        return result


class _Controlled(nn.Module):
    """A neural controlled differential equation over a path of data."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(3, 6), nn.Linear(6, 2)
        self.field = _Field(6, 18)

    def forward(self, x: Tensor) -> Tensor:
        path = new("torchcde:CubicSpline", new("torchcde:natural_cubic_coeffs", x))
        start = self.before(path.evaluate(path.interval[0]))
        end = new(
            "torchcde:cdeint",
            X=path,
            func=lambda t, z: self.field(t, z).reshape(*z.shape, 3),
            z0=start,
            t=path.interval,
            adjoint=False,
            method="rk4",
            options={"step_size": 0.5},
        )
        result: Tensor = self.after(end[..., -1, :])
        return result


class _Process(nn.Module):
    """An exact Gaussian process with a learnt kernel: the marginal likelihood of its training data."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
        self.mean = new("gpytorch.means:ConstantMean")
        self.kernel = new("gpytorch.kernels:ScaleKernel", new("gpytorch.kernels:RBFKernel", ard_num_dims=2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.features(x)
        covariance = self.kernel(h).to_dense() + 0.1 * torch.eye(x.shape[0], dtype=x.dtype)
        return -torch.distributions.MultivariateNormal(self.mean(h), covariance).log_prob(y) / x.shape[0]


class _Equivariant(nn.Module):
    """Two tensor products of the Euclidean group."""

    def __init__(self) -> None:
        super().__init__()
        self.a = new("e3nn.o3:FullyConnectedTensorProduct", "4x0e + 2x1o", "1x0e + 1x1o", "4x0e + 4x1o")
        self.b = new("e3nn.o3:Linear", "4x0e + 4x1o", "2x0e + 2x1o")

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        sh = new("e3nn.o3:spherical_harmonics", [0, 1], positions, True)
        result: Tensor = self.b(self.a(x, sh))
        return result


def _steerable() -> Made:
    gspaces, nn_ = new("importlib:import_module", "e2cnn.gspaces"), new("importlib:import_module", "e2cnn.nn")
    space = gspaces.Rot2dOnR2(4)
    first = nn_.FieldType(space, 3 * [space.trivial_repr])
    second = nn_.FieldType(space, 4 * [space.regular_repr])
    layers = nn.ModuleList(
        nn_.SequentialModule(nn_.R2Conv(kind, second, kernel_size=3, padding=1), nn_.ReLU(second))
        for kind in (first, second)
    )
    return _Steerable(layers, first), (floats(4, 3, 8, 8),)


class _Steerable(nn.Module):
    def __init__(self, layers: nn.ModuleList, kind: Any) -> None:
        super().__init__()
        self.layers, self.kind = layers, kind

    def forward(self, x: Tensor) -> Tensor:
        x = new("e2cnn.nn:GeometricTensor", x, self.kind)
        for layer in self.layers:
            x = layer(x)
        result: Tensor = x.tensor
        return result


def _vectors() -> nn.Module:
    """A perceptron of 16 numbers and 4 vectors."""
    sizes = {"dim_vectors_in": 4, "dim_vectors_out": 4, "dim_feats_in": 16, "dim_feats_out": 16}
    layer: nn.Module = new("geometric_vector_perceptron:GVP", **sizes)
    return layer


SCIENCE: Catalogue = {
    "torch-geometric": {
        "GCN": partial(
            _graph, "GCN", in_channels=8, hidden_channels=16, num_layers=2, out_channels=4, dropout=0.1
        ),
        "GAT": partial(
            _graph, "GAT", in_channels=8, hidden_channels=16, num_layers=2, out_channels=4, heads=2
        ),
        "GraphSAGE": partial(
            _graph, "GraphSAGE", in_channels=8, hidden_channels=16, num_layers=2, out_channels=4
        ),
        "GIN": partial(_graph, "GIN", in_channels=8, hidden_channels=16, num_layers=2, out_channels=4),
        "dense layers with pooling": lambda: (_Dense(), (floats(4, 8, 8), _adjacency())),
        "DenseGINConv": lambda: (
            new(
                "torch_geometric.nn:DenseGINConv",
                nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)),
            ),
            (floats(4, 8, 8), _adjacency()),
        ),
        "MLP": lambda: (new("torch_geometric.nn:MLP", [8, 16, 16, 4], dropout=0.1), (floats(12, 8),)),
    },
    "egnn-pytorch": {
        "EGNN": lambda: (new("egnn_pytorch:EGNN", dim=16), (floats(4, 8, 16), floats(4, 8, 3))),
        "EGNN_Network": lambda: (
            new("egnn_pytorch:EGNN_Network", num_tokens=8, dim=16, depth=2, num_nearest_neighbors=3),
            {"feats": tokens(8, 8), "coors": floats(4, 8, 3)},
        ),
    },
    "En-transformer": {
        "EnTransformer": lambda: (
            new("en_transformer:EnTransformer", dim=16, depth=2, dim_head=32, heads=2),
            (floats(4, 8, 16), floats(4, 8, 3)),
        ),
    },
    "equiformer-pytorch": {
        "Equiformer": lambda: (
            new(
                "equiformer_pytorch:Equiformer",
                num_tokens=8,
                dim=(8, 4),
                dim_head=(4, 4),
                heads=(2, 1),
                num_degrees=2,
                depth=1,
                num_neighbors=3,
                valid_radius=10,
            ),
            {"inputs": tokens(8, 8), "coors": floats(4, 8, 3)},
        ),
    },
    "geometric-vector-perceptron": {
        "GVP": lambda: (
            nn.Sequential(*(_vectors() for _ in range(2))),
            ((floats(4, 16), floats(4, 4, 3)),),
        ),
    },
    "invariant-point-attention": {
        "InvariantPointAttention": lambda: (
            new(
                "invariant_point_attention:InvariantPointAttention",
                dim=16,
                heads=2,
                scalar_key_dim=4,
                scalar_value_dim=4,
                point_key_dim=2,
                point_value_dim=2,
                pairwise_repr_dim=8,
            ),
            {
                "single_repr": floats(4, 8, 16),
                "pairwise_repr": floats(4, 8, 8, 8),
                "rotations": torch.eye(3).expand(4, 8, 3, 3).contiguous(),
                "translations": floats(4, 8, 3),
            },
        ),
    },
    "e3nn": {"FullyConnectedTensorProduct": lambda: (_Equivariant(), (floats(8, 10), floats(8, 3)))},
    "e2cnn": {"R2Conv": _steerable},
    "neuraloperator": {
        "FNO": lambda: (
            new(
                "neuralop.models:FNO",
                n_modes=(4, 4),
                in_channels=1,
                out_channels=1,
                hidden_channels=8,
                n_layers=2,
            ),
            (floats(4, 1, 16, 16),),
        ),
        "TFNO": lambda: (
            new(
                "neuralop.models:TFNO",
                n_modes=(4, 4),
                in_channels=1,
                out_channels=1,
                hidden_channels=8,
                n_layers=2,
                factorization="tucker",
                rank=0.5,
            ),
            (floats(4, 1, 16, 16),),
        ),
        "UNO": lambda: (
            new(
                "neuralop.models:UNO",
                in_channels=1,
                out_channels=1,
                hidden_channels=8,
                n_layers=3,
                uno_out_channels=[8, 8, 8],
                uno_n_modes=[[4, 4]] * 3,
                uno_scalings=[[1.0, 1.0], [0.5, 0.5], [2.0, 2.0]],
                horizontal_skips_map={2: 0},
                channel_mlp_skip="linear",
            ),
            (floats(4, 1, 16, 16),),
        ),
    },
    "torch-harmonics": {
        "RealSHT": lambda: (
            nn.Sequential(
                nn.Conv2d(1, 4, 1),
                new("torch_harmonics:RealSHT", 16, 32),
                new("torch_harmonics:InverseRealSHT", 16, 32),
                nn.Conv2d(4, 2, 1),
            ),
            (floats(4, 1, 16, 32),),
        ),
    },
    "siren-pytorch": {
        "SirenNet": lambda: (
            new("siren_pytorch:SirenNet", dim_in=2, dim_hidden=32, dim_out=3, num_layers=3),
            (floats(16, 2),),
        ),
    },
    "torchdiffeq": {
        "odeint, rk4": lambda: (_Ode("odeint", method="rk4"), (floats(8, 4),)),
        "odeint, dopri5": lambda: (_Ode("odeint", method="dopri5", rtol=1e-4, atol=1e-5), (floats(8, 4),)),
        "odeint_adjoint": lambda: (_Ode("odeint_adjoint", method="rk4"), (floats(8, 4),)),
    },
    "torchcde": {"neural CDE": lambda: (_Controlled(), (floats(4, 6, 3),))},
    "torchdyn": {
        "NeuralODE": lambda: (
            new(
                "torchdyn.core:NeuralODE",
                nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 6)),
                solver="rk4",
            ),
            (floats(8, 6), torch.linspace(0, 1, 3)),
        ),
    },
    "pykan": {
        "KAN": lambda: (
            new(
                "kan:MultKAN",
                width=[4, 5, 2],
                grid=3,
                k=3,
                auto_save=False,
                device="cpu",
                symbolic_enabled=False,
            ),
            (torch.rand(8, 4),),
        ),
    },
    "gpytorch": {"deep kernel": lambda: (_Process(), (floats(8, 4), floats(8)))},
    "pyro-ppl": {
        "ConditionalAutoRegressiveNN": lambda: (
            new("pyro.nn:ConditionalAutoRegressiveNN", 6, 3, [16], param_dims=(1, 1)),
            (floats(8, 6), floats(8, 3)),
        ),
    },
    "geoopt": {
        "on the Stiefel manifold": lambda: (_Orthogonal(), (floats(8, 8),)),
    },
    "deepxde": {
        "FNN": lambda: (new("deepxde.nn:FNN", [2, 16, 16, 1], "tanh", "Glorot normal"), (floats(8, 2),)),
        "PFNN": lambda: (
            new("deepxde.nn:PFNN", [2, [16, 16], [16, 16], 2], "tanh", "Glorot normal"),
            (floats(8, 2),),
        ),
    },
}


class _Orthogonal(nn.Module):
    """A layer whose weight is a parameter on a manifold."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = new(
            "geoopt:ManifoldParameter", torch.linalg.qr(torch.randn(8, 4))[0], manifold=new("geoopt:Stiefel")
        )
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(torch.tanh(x @ self.weight))
        return result
