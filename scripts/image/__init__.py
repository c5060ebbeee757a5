"""What the image build runs to prove itself."""
