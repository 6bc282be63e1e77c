"""Speed of Radius and its competitors on slow links: `aiscale bench radius`."""

from aiscale.bench.radius.study import bench_radius, show_radius
